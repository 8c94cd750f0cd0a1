#include "cuda/sm90/fused/forward.h"

#include <algorithm>
#include <numbers>

#include "core/geometry.h"
#include "core/half.h"
#include "cuda/device.h"
#include "cuda/sm90/fused/schedule.h"
#include "cuda/sm90/fused/tensor_maps.h"
#include "dspattn/error.h"

namespace dspattn::cuda::sm90 {
namespace {

// From this many query rows on, three warpgroups win over two (docs/fused_kernel.md): where rows see all keys, and
// where they do not, when row tiles of 192 rows waste more on the diagonal, the more the costlier the selection is.
constexpr std::int64_t wide_from_rows(bool full, Pattern pattern) {
  return full ? 512 : pattern.group == 4 ? 8192 : 1024;
}

Rows rows_of(const ConstTensorView& tensor) { return {tensor.data, tensor.step(0), tensor.step(1), tensor.step(2)}; }

MaskTensor mask_of(const ConstTensorView& tensor) {
  if (!tensor.present()) return {};
  const auto stride = [&](int dim) { return tensor.extent(dim) == 1 ? 0 : tensor.step(dim); };
  return {tensor.data, stride(0), stride(1), stride(2), stride(3)};
}

// Rows can be copied 16 bytes at a time.
bool vectors(const void* data, DType type, std::int64_t columns, std::int64_t s0, std::int64_t s1, std::int64_t s2) {
  const auto width = static_cast<std::int64_t>(16 / size_bytes(type));
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && columns % width == 0 && columns > 0 && s0 % width == 0 &&
         s1 % width == 0 && s2 % width == 0;
}

bool vectors(const ConstTensorView& tensor) {
  return vectors(tensor.data, tensor.dtype, tensor.extent(3), tensor.step(0), tensor.step(1), tensor.step(2));
}

}  // namespace

Extents extents_of(const ConstTensorView& tensor) {
  return {tensor.extent(0), tensor.extent(1), tensor.extent(2), tensor.extent(3)};
}

FusedParams params_of(const ForwardArgs& args, const core::Geometry& geometry) {
  const Problem& problem = args.problem;
  FusedParams p{};
  p.q = rows_of(problem.q);
  p.k = rows_of(problem.k);
  p.v = rows_of(problem.v);
  p.out = args.out.data;
  p.out_batch_stride = args.out.step(0);
  p.out_head_stride = args.out.step(1);
  p.out_row_stride = args.out.step(2);
  if (args.lse.present()) {
    p.lse = static_cast<float*>(args.lse.data);
    p.lse_batch_stride = args.lse.step(0);
    p.lse_head_stride = args.lse.step(1);
    p.lse_row_stride = args.lse.step(2);
  }
  p.allowed = mask_of(problem.mask.allowed);
  p.bias = mask_of(problem.mask.bias);
  p.bias_is_f32 = problem.mask.bias.present() && problem.mask.bias.dtype == DType::f32;
  if (problem.packed) {
    p.cumulative_q = static_cast<const std::int32_t*>(problem.packed->cu_q.data);
    p.cumulative_k = static_cast<const std::int32_t*>(problem.packed->cu_k.data);
  }
  if (problem.mask.key_lengths.present()) {
    p.key_lengths = static_cast<const std::int32_t*>(problem.mask.key_lengths.data);
  }
  p.heads = tile::Divisor(static_cast<int>(geometry.heads));
  p.heads_per_kv_head = tile::Divisor(static_cast<int>(geometry.heads / geometry.kv_heads));
  p.n_q = static_cast<int>(geometry.n_q);
  p.n_k = static_cast<int>(geometry.n_k);
  p.d = static_cast<int>(geometry.d);
  p.d_v = static_cast<int>(geometry.d_v);
  const core::Band band = core::band_of(problem.mask);
  p.left = tile::clamped_reach(band.left);
  p.right = tile::clamped_reach(band.right);
  p.bottom_right = band.bottom_right;
  const double selection_scale = problem.q.dtype == DType::f32 ? 1.0 : core::selection_scale(geometry.scale);
  p.q_scale = 0x10001u *
              (problem.q.dtype == DType::f16 ? core::encode_f16(selection_scale) : core::encode_bf16(selection_scale));
  p.exp2_scale = static_cast<float>(geometry.scale / selection_scale * std::numbers::log2e);
  const std::uint16_t half = core::encode_f16(p.exp2_scale);
  p.exp2_scale_half = 0x10001u * half;
  p.exp2_scale_ratio = static_cast<float>(p.exp2_scale / core::decode_f16(half));
  p.bias_scale = static_cast<float>(selection_scale / geometry.scale);
  p.vector_q = vectors(problem.q);
  p.vector_k = vectors(problem.k);
  p.vector_v = vectors(problem.v);
  p.vector_out =
      vectors(args.out.data, args.out.dtype, geometry.d_v, p.out_batch_stride, p.out_head_stride, p.out_row_stride);
  return p;
}

bool needs_general(const FusedParams& p) {
  return p.allowed.data != nullptr || p.bias.data != nullptr || p.copy_engine_q == 0 || p.copy_engine_k == 0 ||
         p.copy_engine_v == 0 || p.vector_k == 0 || p.vector_v == 0 || p.vector_out == 0;
}

tile::ItemOrder order_of(const FusedParams& p, const Problem& problem, const core::Geometry& geometry, int tile_q,
                         int blocks) {
  const int sequence_heads = static_cast<int>(geometry.batch * geometry.heads);
  const int row_tiles = tile::divide_up(geometry.n_q, tile_q);
  const bool full = p.left == tile::kMaxRows && p.right == tile::kMaxRows;
  if (!problem.packed && p.key_lengths == nullptr && (full || row_tiles == 1)) {
    const bool short_last = tile_q % 128 != 0 && geometry.n_q % tile_q != 0;  // as Config::kShortLast
    return tile::equal_order(sequence_heads, row_tiles, blocks, short_last);
  }
  // Short sequences at large head dims are short of memory bandwidth: measured 8 to 15 % faster with all row tiles of a
  // head at once, up to 15 % slower at d = 64.
  const bool short_rows = row_tiles <= 8 && std::max(geometry.d, geometry.d_v) > 64;
  return short_rows && !problem.packed
             ? tile::mirrored_order(sequence_heads, row_tiles, blocks)
             : tile::unequal_order(sequence_heads, row_tiles, p.heads_per_kv_head.value, blocks, tile_q);
}

namespace {

// The first element of the last row of the last head.
std::int64_t last_row(const ConstTensorView& tensor) {
  std::int64_t offset = 0;
  for (int dim = 0; dim < 3; ++dim) offset += (tensor.extent(dim) - 1) * tensor.step(dim);
  return offset;
}

// How the general variant loads mask tensors.
void choose_masks(FusedParams& p, const core::Geometry& geometry) {
  const Extents extents{geometry.batch, geometry.heads, geometry.n_q, geometry.n_k};
  const bool allowed = p.allowed.data != nullptr;
  const bool bias = p.bias.data != nullptr;
  p.bias_bytes = p.bias_is_f32 != 0 ? 4 : 2;
  p.mask_bytes = bias ? p.bias_bytes : allowed ? 1 : 0;
  p.mask_engine = (!allowed || make_mask_map(p.allowed_map, p.allowed, extents, 1)) &&
                  (!bias || make_mask_map(p.bias_map, p.bias, extents, p.bias_bytes));
}

// Completes the parameters for a variant; false when the variant cannot serve them.
bool complete(FusedParams& p, const FusedRow& row, const ForwardArgs& args, const core::Geometry& geometry,
              Variant variant, const Launcher& launcher, int blocks) {
  const Problem& problem = args.problem;
  p.keys = tile::key_map(row.pattern, problem.grouping, launcher.tile_k);
  p.copy_engine_q = make_q_map(p.q_map, p.q, extents_of(problem.q), row.type, launcher.tile_q);
  p.copy_engine_k = make_k_map(p.k_map, p.k, extents_of(problem.k), row.type, p.keys, launcher.tile_k);
  p.copy_engine_v = make_v_map(p.v_map, p.v, extents_of(problem.v), row.type, p.keys, launcher.tile_k);
  const Extents out{args.out.extent(0), args.out.extent(1), args.out.extent(2), args.out.extent(3)};
  p.copy_engine_out = make_out_map(p.out_map, {p.out, p.out_batch_stride, p.out_head_stride, p.out_row_stride}, out,
                                   row.type, variant == Variant::full ? kSentRows : kStoredRows);
  p.order = order_of(p, problem, geometry, launcher.tile_q << p.pairs, blocks >> p.pairs);
  if (variant == Variant::general) choose_masks(p, geometry);
  p.short_items = geometry.n_k <= 2 * tile::kBlockKeys;
  p.partial_blocks =
      variant == Variant::general || problem.packed || p.key_lengths != nullptr || geometry.n_k % tile::kBlockKeys != 0;
  // Blocks that need masking come first where that is faster: there their code stands in for the first tile's, and the
  // rest is one run. Not under causal masks in general, whose first rows would see few keys to take a reference from.
  const bool full = p.left == tile::kMaxRows && p.right == tile::kMaxRows;
  const bool short_causal = launcher.pairs && p.short_items != 0 && p.left == tile::kMaxRows && !full;
  p.descending = (full && p.partial_blocks != 0) || short_causal;
  p.last_k = last_row(problem.k);
  p.last_v = last_row(problem.v);
  if (variant == Variant::full && p.copy_engine_out == 0) return false;
  return variant == Variant::general || !needs_general(p);
}

// Sequences whose lengths only the device knows. The general variant walks through them as they come.
bool scheduled(const Problem& problem) { return problem.packed || problem.mask.key_lengths.present(); }

// Query rows of a sequence; of a packed batch, the mean.
std::int64_t mean_rows(const Problem& problem, const core::Geometry& geometry) {
  return problem.packed ? problem.q.extent(2) / geometry.batch : geometry.n_q;
}

// Whether thread blocks work in pairs that share their loads of K and V.
bool works_in_pairs(const FusedParams& p, const Problem& problem, const core::Geometry& geometry, int tile_q,
                    int multiprocessors) {
  if (p.left != tile::kMaxRows || multiprocessors < 2) return false;
  if (scheduled(problem)) {
    // Two heads' last row tiles may be an item (tile/schedule.h). Measured: 0 to 3 % faster, shorter ones -1 to 2 %.
    return p.right == tile::kMaxRows && geometry.heads % 2 == 0 && mean_rows(problem, geometry) >= 512;
  }
  // A pair's blocks take equally long: one idles where the number of row tiles is odd, and for a tile of keys now and
  // then where the mask is causal. Measured (docs/fused_kernel.md): 1 to 4 % faster with 32 row tiles and more, 2 to 4
  // % slower with 4 or 8. Two are a head in one item, whose time is that of its loads: 2 to 3 % faster.
  const int row_tiles = tile::divide_up(geometry.n_q, tile_q);
  const bool many = std::min<std::int64_t>(row_tiles, geometry.n_k / tile::kBlockKeys) >= 32;
  const bool whole_heads = row_tiles == 2;
  return many || whole_heads || (p.right == tile::kMaxRows && row_tiles % 2 == 0);
}

std::int64_t schedule_entries(const Problem& problem, const core::Geometry& geometry) {
  return problem.packed ? problem.q.extent(2) / tile::kLeastTileRows + geometry.batch
                        : geometry.batch * tile::divide_up(geometry.n_q, tile::kLeastTileRows);
}

ScheduleParams schedule_of(const FusedParams& p, const ForwardArgs& args, const core::Geometry& geometry, int tile_q) {
  ScheduleParams s;
  s.header = static_cast<tile::ScheduleHeader*>(args.run.workspace);
  s.entries = reinterpret_cast<tile::ScheduleEntry*>(s.header + 1);
  s.capacity = static_cast<int>(schedule_entries(args.problem, geometry));
  s.cumulative_q = p.cumulative_q;
  s.cumulative_k = p.cumulative_k;
  s.key_lengths = p.key_lengths;
  s.sequences = static_cast<int>(geometry.batch);
  s.n_q = p.n_q;
  s.n_k = p.n_k;
  s.tile_q = tile_q;
  return s;
}

}  // namespace

void fused_why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals) {
  const DeviceFacts& device = device_facts(problem.device.index);
  if (!device.present) {
    refusals.add([&] { return "device: " + device.absence; });
  } else if (device.major != 9) {
    refusals.add([&] {
      return "device: needs compute capability 9.0 (Hopper), got " + std::to_string(device.major) + "." +
             std::to_string(device.minor);
    });
  }
  if (problem.q.dtype != row.type) {
    refusals.add(
        [&] { return "q: takes " + std::string(name(row.type)) + ", got " + std::string(name(problem.q.dtype)); });
  }
  if (!(problem.pattern == row.pattern)) {
    refusals.add([&] { return "pattern: takes " + to_string(row.pattern) + ", got " + to_string(problem.pattern); });
  }
  const core::Geometry geometry = core::geometry_of(problem);
  const std::int64_t dim = std::max(geometry.d, geometry.d_v);
  if (dim > row.dim || (dim <= row.dim_above && row.dim_above > 0)) {
    refusals.add([&] {
      return "d, d_v: takes a larger of " + std::to_string(row.dim_above + 1) + " to " + std::to_string(row.dim) +
             ", got " + std::to_string(dim);
    });
  }
  if (geometry.n_q > tile::kMaxRows || geometry.n_k > tile::kMaxRows) {
    refusals.add([&] {
      return "n_q, n_k: takes up to " + std::to_string(tile::kMaxRows) + ", got " +
             std::to_string(std::max(geometry.n_q, geometry.n_k));
    });
  }
  if (problem.mask.offset != 0 && (problem.mask.causal || problem.mask.window_left || problem.mask.window_right)) {
    refusals.add([&] { return "mask.offset: takes 0, got " + std::to_string(problem.mask.offset); });
  }
  constexpr std::int64_t kMaxItems = std::int64_t{1} << 28;
  if (const std::int64_t items = geometry.batch * geometry.heads * ((geometry.n_q + 127) / 128); items > kMaxItems) {
    refusals.add([&] {
      return "batch * heads * n_q / 128: takes up to " + std::to_string(kMaxItems) + ", got " + std::to_string(items);
    });
  }
  for (const auto& [mask, which] : {std::pair{&problem.mask.allowed, "allowed"}, {&problem.mask.bias, "bias"}}) {
    constexpr std::int64_t kMaxKeyStride = std::int64_t{1} << 21;  // 128 keys of 4 bytes within 32 bits
    if (mask->present() && mask->extent(3) > 1 && std::abs(mask->step(3)) > kMaxKeyStride) {
      refusals.add([&] {
        return std::string(which) + ": takes a stride along the keys of up to " + std::to_string(kMaxKeyStride) +
               ", got " + std::to_string(mask->step(3));
      });
    }
  }
}

std::size_t fused_workspace(const ForwardArgs& args) {
  if (!scheduled(args.problem)) return 0;
  return tile::schedule_bytes(schedule_entries(args.problem, core::geometry_of(args.problem)));
}

void fused_forward_launch(const FusedRow& row, const ForwardArgs& args) {
  const core::Geometry geometry = core::geometry_of(args.problem);
  if (geometry.batch == 0 || geometry.heads == 0 || geometry.n_q == 0 || geometry.d_v == 0) return;
  const CurrentDevice device(args.problem.device.index);
  FusedParams params = params_of(args, geometry);
  const bool full = params.left == tile::kMaxRows && params.right == tile::kMaxRows;
  const bool wide = has_wide(row.dim) && mean_rows(args.problem, geometry) >= wide_from_rows(full, row.pattern);
  const Variant preferred = wide ? Variant::wide : Variant::narrow;
  for (const Variant variant : {Variant::full, preferred, Variant::general}) {
    const Launcher launcher = variant == Variant::general ? row.general_launcher(variant) : row.launcher(variant);
    if (launcher.launch == nullptr) continue;
    const int multiprocessors = device_facts(args.problem.device.index).multiprocessors;
    const bool pairs =
        launcher.pairs && works_in_pairs(params, args.problem, geometry, launcher.tile_q, multiprocessors);
    // One block of keys or two an item: the narrow variant has a place for their results.
    const bool whole = !scheduled(args.problem) && geometry.n_k % tile::kBlockKeys == 0;
    if (variant == Variant::full && !(pairs && full && whole && geometry.n_k > 2 * tile::kBlockKeys)) continue;
    params.pairs = pairs ? 1 : 0;
    const int item_rows = launcher.tile_q << params.pairs;
    const int row_tiles = tile::divide_up(geometry.n_q, item_rows);
    const std::int64_t items = geometry.batch * geometry.heads * row_tiles;
    const int workers = multiprocessors >> params.pairs;  // blocks or pairs
    // Where the last row tile is often shorter and cheaper, as one of 192 rows is, more thread blocks are faster.
    params.alike = pairs && !scheduled(args.problem) && (full || row_tiles == 1) ? 1 : 0;
    const int blocks = (params.alike != 0 ? tile::workers_needed(items, workers)
                                          : static_cast<int>(std::min<std::int64_t>(items, workers)))
                       << params.pairs;
    if (!complete(params, row, args, geometry, variant, launcher, blocks)) continue;
    if (variant != Variant::general && scheduled(args.problem)) {
      const ScheduleParams schedule = schedule_of(params, args, geometry, launcher.tile_q);
      params.schedule = schedule.header;
      check(launch_schedule(schedule, static_cast<cudaStream_t>(args.run.stream)), "launching the schedule");
    }
    check(launcher.launch(params, blocks, static_cast<cudaStream_t>(args.run.stream)), "launching the fused kernel");
    return;
  }
}

}  // namespace dspattn::cuda::sm90
