// Norm, rotation and KV write against the same in double; cache slots that no token names stay as they were; a token
// alone gives the bits it gives in a batch.
#include <cuda_runtime_api.h>

#include <cmath>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

constexpr int32_t kMaxPosition = 9;
constexpr float kEps = 0.05f;  // large enough to be missed
constexpr int64_t kBlocks = 4;
constexpr size_t kNone = static_cast<size_t>(-1);

struct Shape {
  DType dtype;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  bool q_norm, k_norm;
  int64_t padding_bytes;  // after each block
};

// A launch's arguments, with arrays of exact size.
struct Call {
  Exact<float> qkv;
  Exact<int32_t> positions;
  Exact<int64_t> slots;
  Exact<float> cos, sin, q_norm, k_norm;
  Exact<uint16_t> q, cache;
  Shape shape;

  size_t num_tokens() const { return slots.size(); }
  int64_t block_bytes() const {
    return int64_t{4} * shape.num_kv_heads * shape.block_size * shape.head_dim + shape.padding_bytes;
  }
  // First element of the cache row of a token's key (0) or value (1).
  size_t cache_row(size_t token, int32_t kv_head, int32_t is_value) const {
    const int64_t block = slots[token] / shape.block_size, offset = slots[token] % shape.block_size;
    return static_cast<size_t>(block * block_bytes() / 2 +
                               ((int64_t{kv_head} * 2 + is_value) * shape.block_size + offset) * shape.head_dim);
  }
  int run() {
    RopeKvWriteParams p;
    p.qkv = qkv.data();
    p.positions = positions.data();
    p.slot_mapping = slots.data();
    p.cos = cos.data();
    p.sin = sin.data();
    p.q_norm = shape.q_norm ? q_norm.data() : nullptr;
    p.k_norm = shape.k_norm ? k_norm.data() : nullptr;
    p.norm_eps = kEps;
    p.q = q.data();
    p.kv = {cache.data(), shape.dtype, shape.num_kv_heads, shape.head_dim, shape.block_size, block_bytes()};
    p.num_tokens = static_cast<int32_t>(num_tokens());
    p.num_heads = shape.num_heads;
    return rope_kv_write(p, nullptr);
  }
};

// One head; norm may be null; angles: the row of cos and sin, kNone for values.
std::vector<double> reference(const float* head, size_t head_dim, const float* norm, const Call& call, size_t angles) {
  std::vector<double> x(head, head + head_dim), out(head_dim);
  if (norm) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    for (size_t i = 0; i < head_dim; ++i) x[i] *= norm[i] / std::sqrt(squares / static_cast<double>(head_dim) + kEps);
  }
  if (angles == kNone) return x;
  const size_t half = head_dim / 2;
  for (size_t i = 0; i < half; ++i) {
    const double c = call.cos[angles * half + i], s = call.sin[angles * half + i];
    out[i] = x[i] * c - x[i + half] * s;
    out[i + half] = x[i + half] * c + x[i] * s;
  }
  return out;
}

Call make_call(Check& check, const Shape& shape, size_t num_tokens) {
  Call call;
  call.shape = shape;
  const size_t head_dim = static_cast<size_t>(shape.head_dim);
  call.qkv = check.floats(num_tokens * static_cast<size_t>(shape.num_heads + 2 * shape.num_kv_heads) * head_dim);
  call.positions = check.integers(num_tokens, 0, kMaxPosition - 1);
  call.slots = Exact<int64_t>(num_tokens);
  const std::vector<int32_t> slots = check.permutation(static_cast<int32_t>(kBlocks) * shape.block_size);
  std::copy_n(slots.begin(), num_tokens, call.slots.begin());
  call.cos = check.floats(kMaxPosition * head_dim / 2);
  call.sin = check.floats(kMaxPosition * head_dim / 2);
  call.q_norm = check.floats(head_dim, 0.5f, 1.5f);
  call.k_norm = check.floats(head_dim, 0.5f, 1.5f);
  call.q = Exact<uint16_t>(num_tokens * static_cast<size_t>(shape.num_heads) * head_dim);
  call.cache = Exact<uint16_t>(static_cast<size_t>(kBlocks * call.block_bytes() / 2));
  return call;
}

// Takes the written rows of keys (0) or values (1) out of the cache, which is left with 0xff in their place.
std::vector<uint16_t> take_rows(Exact<uint16_t>& cache, const Call& call, int32_t is_value) {
  std::vector<uint16_t> rows;
  for (size_t token = 0; token < call.num_tokens(); ++token)
    for (int32_t head = 0; head < call.shape.num_kv_heads; ++head) {
      uint16_t* row = cache.data() + call.cache_row(token, head, is_value);
      rows.insert(rows.end(), row, row + call.shape.head_dim);
      std::fill_n(row, call.shape.head_dim, uint16_t{0xffff});
    }
  return rows;
}

void check_token_alone(Check& check, const std::string& name, const Call& batch, size_t token) {
  Call alone = batch;
  const auto share = [&](const auto& of) {
    const auto count = static_cast<std::ptrdiff_t>(of.size() / batch.num_tokens());
    const auto* first = of.begin() + static_cast<std::ptrdiff_t>(token) * count;
    return std::vector(first, first + count);
  };
  alone.qkv = share(batch.qkv);
  alone.positions = share(batch.positions);
  alone.slots = share(batch.slots);
  alone.q = Exact<uint16_t>(batch.q.size() / batch.num_tokens());
  alone.cache = Exact<uint16_t>(batch.cache.size());
  check.success(name, alone.run());
  check.equal_bits(name + ": q", alone.q.data(), batch.q.data() + token * alone.q.size(), alone.q.bytes());
  const size_t row_bytes = static_cast<size_t>(batch.shape.head_dim) * 2;
  for (int32_t head = 0; head < batch.shape.num_kv_heads; ++head)
    for (const int32_t is_value : {0, 1}) {
      const size_t row = batch.cache_row(token, head, is_value);
      check.equal_bits(name + ": cache", alone.cache.data() + row, batch.cache.data() + row, row_bytes);
    }
}

void check_shape(Check& check, const Shape& shape) {
  const std::string name = std::string(dtype_name(shape.dtype)) + ", heads " + std::to_string(shape.num_heads) + "/" +
                           std::to_string(shape.num_kv_heads) + " of " + std::to_string(shape.head_dim) +
                           ", block_size " + std::to_string(shape.block_size);
  Call call = make_call(check, shape, 3);
  check.success(name, call.run());

  std::vector<double> q, keys, values;
  const size_t head_dim = static_cast<size_t>(shape.head_dim);
  const float* head = call.qkv.data();
  for (size_t token = 0; token < call.num_tokens(); ++token) {
    const auto add = [&](std::vector<double>& to, int32_t num_heads, const float* norm, size_t angles) {
      for (int32_t i = 0; i < num_heads; ++i, head += head_dim) {
        const std::vector<double> out = reference(head, head_dim, norm, call, angles);
        to.insert(to.end(), out.begin(), out.end());
      }
    };
    const size_t position = static_cast<size_t>(call.positions[token]);
    add(q, shape.num_heads, shape.q_norm ? call.q_norm.data() : nullptr, position);
    add(keys, shape.num_kv_heads, shape.k_norm ? call.k_norm.data() : nullptr, position);
    add(values, shape.num_kv_heads, nullptr, kNone);
  }
  check.close(name + ": q", shape.dtype, call.q.data(), q, 3e-3);
  Exact<uint16_t> cache = call.cache;
  check.close(name + ": keys", shape.dtype, take_rows(cache, call, 0).data(), keys, 3e-3);
  check.close(name + ": values", shape.dtype, take_rows(cache, call, 1).data(), values, 3e-3);
  check.equal_bits(name + ": the rest of the cache", cache.data(), Exact<uint16_t>(cache.size()).data(), cache.bytes());
  check_token_alone(check, name + ": a token alone", call, 2);
}

// Keys and values beyond float16's range become its largest numbers.
void check_large_values(Check& check) {
  Call call = make_call(check, {DType::kFloat16, 1, 1, 64, 8, false, false, 0}, 1);
  std::fill_n(call.cos.data(), call.cos.size(), 1.0f);
  std::fill_n(call.sin.data(), call.sin.size(), 0.0f);
  for (const size_t head : {1, 2}) {
    float* const row = call.qkv.data() + head * 64;
    row[0] = row[63] = 1e6f;
    row[1] = row[62] = -1e6f;
    row[2] = std::nanf("");
    row[3] = 65504;
  }
  check.success("large values", call.run());
  for (const int32_t is_value : {0, 1}) {
    const auto got = [&](size_t i) {
      return from_half(DType::kFloat16, call.cache[call.cache_row(0, 0, is_value) + i]);
    };
    const std::string name = is_value ? "a large value" : "a large key";
    check.ok(name, got(0) == 65504 && got(63) == 65504 && got(3) == 65504);
    check.ok(name + ", negative", got(1) == -65504 && got(62) == -65504);
    check.ok(name + ", NaN", std::isnan(got(2)));
  }
}

int with_shape(int32_t num_tokens, DType dtype, int32_t head_dim, int32_t block_size, int32_t num_heads = 4,
               int32_t num_kv_heads = 2) {
  RopeKvWriteParams params;
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.kv.dtype = dtype;
  params.kv.num_kv_heads = num_kv_heads;
  params.kv.head_dim = head_dim;
  params.kv.block_size = block_size;
  return rope_kv_write(params, nullptr);
}

}  // namespace

void check_rope_kv_write(Check& check) {
  const DType bf16 = DType::kBFloat16, fp16 = DType::kFloat16;
  check_shape(check, {bf16, 9, 3, 64, 8, false, false, 0});
  check_shape(check, {fp16, 2, 2, 64, 16, true, true, 0});
  check_shape(check, {bf16, 4, 1, 96, 16, true, true, 0});
  check_shape(check, {bf16, 8, 1, 128, 8, true, true, 0});
  check_shape(check, {fp16, 2, 1, 128, 16, true, false, 64});
  check_shape(check, {bf16, 4, 2, 256, 8, false, true, 0});
  check_shape(check, {fp16, 5, 2, 256, 16, true, true, 0});  // two blocks a token
  check_shape(check, {bf16, 3, 1, 80, 12, true, true, 0});   // no powers of two
  check_shape(check, {fp16, 1, 1, 16, 8, true, true, 0});
  check_large_values(check);

  check.success("no tokens", with_shape(0, bf16, 64, 16));
  check.fails("-1 tokens", with_shape(-1, bf16, 64, 16), cudaErrorInvalidValue);
  check.fails("a float32 cache", with_shape(1, DType::kFloat32, 64, 16), cudaErrorInvalidValue);
  check.fails("head_dim 72", with_shape(1, bf16, 72, 16), cudaErrorInvalidValue);
  check.fails("head_dim 272", with_shape(1, bf16, 272, 16), cudaErrorInvalidValue);
  check.fails("head_dim 0", with_shape(1, bf16, 0, 16), cudaErrorInvalidValue);
  check.fails("-4 heads", with_shape(0, bf16, 64, 16, -4), cudaErrorInvalidValue);
  check.fails("-2 kv heads", with_shape(0, bf16, 64, 16, 4, -2), cudaErrorInvalidValue);
  check.fails("block_size 0", with_shape(1, bf16, 64, 0), cudaErrorInvalidValue);
}
