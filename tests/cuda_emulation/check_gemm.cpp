// The GEMM against sums in double, and its promise: the same bits whatever the tile and whatever the other rows.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

constexpr GemmTile kTiles[] = {GemmTile::k16x16, GemmTile::k16x32, GemmTile::k16x64,
                               GemmTile::k64x32, GemmTile::k64x64, GemmTile::k128x128};

struct Case {
  int32_t num_rows, out_features, in_features;
  DType dtype;
  Epilogue epilogue;
  bool with_bias;
  int32_t padding;  // of a row of out
  DType out_dtype = DType::kBFloat16;
};

// One product with all its inputs. Columns of out from num_columns to the stride are padding.
struct Problem {
  std::string name;
  GemmParams params;
  Exact<uint16_t> a, weight;
  Exact<float> bias;
  Exact<unsigned char> before;  // out as it is before the call: NaN, but for what kAdd adds to

  bool is_silu_mul() const { return params.epilogue == Epilogue::kSiluMul; }
  int32_t num_columns() const { return is_silu_mul() ? params.out_features / 2 : params.out_features; }
  size_t element_size() const { return is_silu_mul() ? 2 : 4; }
  size_t row_bytes() const { return static_cast<size_t>(params.out_stride) * element_size(); }
};

Problem make_problem(Check& check, const Case& c) {
  Problem problem;
  problem.name = std::to_string(c.num_rows) + " x " + std::to_string(c.out_features) + " x " +
                 std::to_string(c.in_features) + ", epilogue " + std::to_string(static_cast<int>(c.epilogue)) + ", " +
                 (c.dtype == DType::kBFloat16 ? "bf16" : "fp16") + (c.with_bias ? ", bias: " : ": ");
  GemmParams& p = problem.params;
  p.dtype = c.dtype;
  p.out_dtype = c.out_dtype;
  p.num_rows = c.num_rows;
  p.out_features = c.out_features;
  p.in_features = c.in_features;
  p.epilogue = c.epilogue;
  p.out_stride = problem.num_columns() + c.padding;
  problem.a = check.halves(c.dtype, static_cast<size_t>(c.num_rows) * c.in_features);
  const float scale = 3 / std::sqrt(static_cast<float>(c.in_features));
  problem.weight = check.halves(c.dtype, static_cast<size_t>(c.out_features) * c.in_features, -scale, scale);
  if (c.with_bias) problem.bias = check.floats(c.out_features);
  p.a = problem.a.data();
  p.weight = problem.weight.data();
  p.bias = c.with_bias ? problem.bias.data() : nullptr;
  problem.before = Exact<unsigned char>(c.num_rows * problem.row_bytes());
  if (c.epilogue == Epilogue::kAdd) {
    for (int32_t row = 0; row < c.num_rows; ++row) {
      const Exact<float> values = check.floats(problem.num_columns());
      std::memcpy(&problem.before[row * problem.row_bytes()], values.data(), values.bytes());
    }
  }
  return problem;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// [num_rows, num_columns]
std::vector<double> expected(const Problem& problem) {
  const GemmParams& p = problem.params;
  std::vector<double> values, sums(p.out_features);
  for (int64_t row = 0; row < p.num_rows; ++row) {
    for (int64_t column = 0; column < p.out_features; ++column) {
      sums[column] = p.bias == nullptr ? 0 : p.bias[column];
      for (int64_t k = 0; k < p.in_features; ++k) {
        sums[column] += static_cast<double>(from_half(p.dtype, problem.a[row * p.in_features + k])) *
                        from_half(p.dtype, problem.weight[column * p.in_features + k]);
      }
    }
    for (int64_t column = 0; column < problem.num_columns(); ++column) {
      const int64_t gate = column / kGateUpGroup * 2 * kGateUpGroup + column % kGateUpGroup;
      float old = 0;
      if (p.epilogue == Epilogue::kAdd) {
        std::memcpy(&old, &problem.before[row * problem.row_bytes() + column * sizeof(old)], sizeof(old));
      }
      values.push_back(problem.is_silu_mul() ? silu(sums[gate]) * sums[gate + kGateUpGroup] : old + sums[column]);
    }
  }
  return values;
}

// Rows [first_row, first_row + num_rows) of the product, by one call; the tile that gemm() chooses if there is none.
Exact<unsigned char> run(Check& check, const Problem& problem, const GemmTile* tile, int32_t first_row,
                         int32_t num_rows) {
  Exact<unsigned char> out(num_rows * problem.row_bytes());
  std::memcpy(out.data(), &problem.before[first_row * problem.row_bytes()], out.bytes());
  GemmParams params = problem.params;
  Exact<uint16_t> a(static_cast<size_t>(num_rows) * params.in_features);
  std::memcpy(a.data(), &problem.a[static_cast<size_t>(first_row) * params.in_features], a.bytes());
  params.a = a.data();
  params.num_rows = num_rows;
  params.out = out.data();
  check.success(problem.name + "launch",
                tile == nullptr ? gemm(params, nullptr) : gemm_with_tile(params, *tile, nullptr));
  return out;
}

void check_values(Check& check, const Problem& problem, const Exact<unsigned char>& out) {
  const size_t columns_bytes = problem.num_columns() * problem.element_size();
  Exact<unsigned char> columns(problem.params.num_rows * columns_bytes);
  bool padding_untouched = true;
  for (int32_t row = 0; row < problem.params.num_rows; ++row) {
    const unsigned char* from = &out[row * problem.row_bytes()];
    std::memcpy(&columns[row * columns_bytes], from, columns_bytes);
    for (size_t i = columns_bytes; i < problem.row_bytes(); ++i) padding_untouched &= from[i] == 0xff;
  }
  if (problem.is_silu_mul()) {
    check.close(problem.name + "out", problem.params.out_dtype, columns.data(), expected(problem), 4e-3);
  } else {
    check.close(problem.name + "out", DType::kFloat32, columns.data(), expected(problem), 1e-5);
  }
  check.ok(problem.name + "padding of out is left alone", padding_untouched);
}

void check_case(Check& check, const Case& c) {
  const Problem problem = make_problem(check, c);
  const Exact<unsigned char> whole = run(check, problem, nullptr, 0, c.num_rows);
  check_values(check, problem, whole);
  for (const GemmTile& tile : kTiles) {
    if (tile == choose_gemm_tile(c.num_rows, c.out_features)) continue;
    check.equal_bits(problem.name + "with tile " + std::to_string(static_cast<int>(tile)),
                     run(check, problem, &tile, 0, c.num_rows).data(), whole.data(), whole.bytes());
  }
  // The last rows alone: they lie elsewhere in their tile, and may get another one.
  for (const int32_t count : {1, c.num_rows / 2}) {
    if (count == 0) continue;
    const Exact<unsigned char> part = run(check, problem, nullptr, c.num_rows - count, count);
    check.equal_bits(problem.name + "the last " + std::to_string(count) + " rows alone", part.data(),
                     &whole[(c.num_rows - count) * problem.row_bytes()], part.bytes());
  }
}

void check_choice(Check& check) {
  const auto expect_tile = [&](int32_t num_rows, int32_t out_features, GemmTile tile) {
    check.ok("tile chosen for " + std::to_string(num_rows) + " x " + std::to_string(out_features),
             choose_gemm_tile(num_rows, out_features) == tile);
  };
  expect_tile(1, 896, GemmTile::k16x16);
  expect_tile(1, 4096, GemmTile::k16x32);
  expect_tile(16, 28672, GemmTile::k16x64);
  expect_tile(17, 28672, GemmTile::k64x64);
  expect_tile(17, 4096, GemmTile::k64x32);
  expect_tile(256, 4096, GemmTile::k64x64);
  expect_tile(65, 28672, GemmTile::k128x128);
  expect_tile(512, 4096, GemmTile::k128x128);
}

void check_bad_arguments(Check& check) {
  Case c = {3, 32, 16, DType::kBFloat16, Epilogue::kSiluMul, false, 0};
  const Problem problem = make_problem(check, c);
  Exact<unsigned char> out = problem.before;
  const auto call = [&](auto change) {
    GemmParams params = problem.params;
    params.out = out.data();
    change(params);
    return gemm(params, nullptr);
  };
  const auto refused = [&](const char* name, auto change) { check.fails(name, call(change), 1); };
  refused("12 in_features", [](GemmParams& p) { p.in_features = 12; });
  refused("no in_features", [](GemmParams& p) { p.in_features = 0; });
  refused("too many in_features", [](GemmParams& p) { p.in_features = 1 << 25; });
  refused("float32", [](GemmParams& p) { p.dtype = DType::kFloat32; });
  refused("negative num_rows", [](GemmParams& p) { p.num_rows = -1; });
  refused("negative out_features", [](GemmParams& p) { p.out_features = -16; });
  refused("more blocks than a grid holds", [](GemmParams& p) {
    p.epilogue = Epilogue::kStore;
    p.num_rows = p.out_features = INT32_MAX;
    p.out_stride = INT32_MAX;
  });
  refused("half a group of gate and up", [](GemmParams& p) { p.out_features = 24; });
  refused("silu_mul to float32", [](GemmParams& p) { p.out_dtype = DType::kFloat32; });
  refused("rows of out that overlap", [](GemmParams& p) { p.out_stride = 8; });
  refused("rows of out that are not aligned", [](GemmParams& p) { p.out_stride = 20; });
  refused("rows of sums that overlap", [](GemmParams& p) {
    p.epilogue = Epilogue::kStore;
    p.out_stride = 31;
  });
  check.success("no rows", call([](GemmParams& p) { p.num_rows = 0; }));
  check.success("no columns", call([](GemmParams& p) { p.out_features = 0; }));
  check.equal_bits("out is left alone", out.data(), problem.before.data(), out.bytes());
}

}  // namespace

void check_gemm(Check& check) {
  const DType bf16 = DType::kBFloat16, fp16 = DType::kFloat16;
  check_case(check, {1, 8, 8, bf16, Epilogue::kStore, false, 0});
  check_case(check, {3, 37, 16, fp16, Epilogue::kStore, true, 2});  // odd columns; rows not evenly aligned
  check_case(check, {5, 300, 72, fp16, Epilogue::kAdd, true, 3});
  check_case(check, {5, 24, 1032, bf16, Epilogue::kAdd, false, 0});  // every tile goes round its stages
  check_case(check, {16, 48, 64, fp16, Epilogue::kSiluMul, false, 8, fp16});
  check_case(check, {17, 96, 576, bf16, Epilogue::kSiluMul, true, 0});
  check_case(check, {33, 16, 136, fp16, Epilogue::kSiluMul, true, 8});
  check_case(check, {70, 24, 200, bf16, Epilogue::kStore, true, 3});
  check_case(check, {130, 40, 64, fp16, Epilogue::kAdd, false, 0});  // more than one group of 16-row tiles
  check_choice(check);
  check_bad_arguments(check);
}
