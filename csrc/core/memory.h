// Large aligned memory, taken once at start.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace steploop {

// Every buffer begins at a multiple of this, and the memory behind it is its own up to the next: bytes.
inline constexpr size_t kBufferAlignment = 64;

// Zeroed memory straight from the kernel, backed by huge pages where it allows; pages cost nothing until touched.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size_bytes);  // throws InvalidArgumentError saying how much was asked for
  static Buffer view(void* data, size_t size_bytes);  // of memory that somebody else keeps
  ~Buffer();
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        mapped_(std::exchange(other.mapped_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // 0: a view
};

// Part of somebody's memory, by what it holds.
struct NamedBuffer {
  const char* name;
  void* data;
  size_t size_bytes;
};

// Buffers that live as long as this, side by side in large chunks: a weight of less than a huge page lies in one, too,
// which is what reading it at the memory's speed takes.
class Arena {
 public:
  Buffer allocate(size_t size_bytes);  // zeroed, aligned to kBufferAlignment

 private:
  static constexpr size_t kChunkSize = size_t{32} << 20;
  std::vector<Buffer> chunks_;
  size_t used_ = 0;  // of the last chunk
};

}  // namespace steploop
