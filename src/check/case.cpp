#include "check/case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "check/random.h"

namespace dspattn::check {
namespace {

Pattern draw_pattern(Random& random) {
  const std::int64_t kind = random.below(100);
  if (kind < 28) return {2, 4};
  if (kind < 50) return {1, 2};
  if (kind < 62) return Pattern::dense();
  if (kind < 66) {
    const int group = static_cast<int>(random.between(2, kMaxGroup));
    return {group, group};  // dense by another name
  }
  const int group = static_cast<int>(random.chance(50) ? random.between(2, kMaxGroup)
                                                       : random.one_of<std::int64_t>({2, 4, 8, 16, 32}));
  return {static_cast<int>(random.between(1, group)), group};
}

std::int64_t draw_length(Random& random, std::int64_t max_n) {
  const std::int64_t kind = random.below(100);
  if (kind < 3) return 0;
  if (kind < 30) return std::min(max_n, random.between(1, 20));
  if (kind < 60) return std::min(max_n, random.between(1, 140));
  if (kind < 70) return std::min<std::int64_t>(max_n, random.one_of<std::int64_t>({32, 64, 127, 128, 129, 256}));
  return random.between(1, std::max<std::int64_t>(1, max_n));
}

std::int64_t draw_head_dim(Random& random) {
  return random.chance(60) ? random.one_of<std::int64_t>({16, 32, 64, 80, 96, 128, 256}) : random.between(1, 256);
}

void draw_sizes(Random& random, Case& drawn, const DrawLimits& limits) {
  drawn.d = draw_head_dim(random);
  drawn.d_v = random.chance(60) ? drawn.d : draw_head_dim(random);
  if (limits.head_dim) drawn.d = drawn.d_v = *limits.head_dim;
  drawn.batch = random.chance(2) ? 0 : random.between(1, 3);
  drawn.kv_heads = random.between(1, 3);
  drawn.heads = drawn.kv_heads * (random.chance(50) ? 1 : random.between(1, 4));
  drawn.n_k = draw_length(random, limits.max_n);
  drawn.n_q = random.chance(50) ? drawn.n_k : draw_length(random, limits.max_n);
  if (random.chance(8)) drawn.n_q = 1;
  if (limits.max_queries) drawn.n_q = random.between(1, *limits.max_queries);

  const auto work = [&] { return drawn.batch * drawn.heads * drawn.n_q * drawn.n_k * (drawn.d + drawn.d_v); };
  while (work() > limits.max_work) {
    switch (random.below(5)) {
      case 0:
        drawn.batch = 1;
        break;
      case 1:
        drawn.heads = drawn.kv_heads;
        break;
      case 2:
        drawn.heads = drawn.heads / drawn.kv_heads;
        drawn.kv_heads = 1;
        break;
      case 3:
        drawn.n_q = (drawn.n_q + 1) / 2;
        break;
      default:
        if (limits.head_dim) {
          drawn.n_k = (drawn.n_k + 1) / 2;
        } else {
          drawn.d = (drawn.d + 1) / 2;
          drawn.d_v = (drawn.d_v + 1) / 2;
        }
    }
  }
}

// Cumulative lengths of `batch` sequences of at most `longest` rows.
std::vector<std::int32_t> draw_cumulative(Random& random, std::int64_t batch, std::int64_t longest) {
  std::vector<std::int32_t> cumulative{0};
  for (std::int64_t s = 0; s < batch; ++s) {
    const std::int64_t length = random.chance(10) ? 0 : random.chance(30) ? longest : random.between(0, longest);
    cumulative.push_back(cumulative.back() + static_cast<std::int32_t>(length));
  }
  return cumulative;
}

Broadcast draw_broadcast(Random& random) {
  Broadcast broadcast;
  for (std::size_t dim = 0; dim < 4; ++dim) {
    broadcast.one[dim] = random.chance(dim == 3 ? 15 : 40);
    broadcast.zero_stride[dim] = random.chance(10);
  }
  return broadcast;
}

void draw_mask(Random& random, Case& drawn) {
  drawn.causal = random.chance(35);
  drawn.alignment = random.chance(70) ? Alignment::bottom_right : Alignment::top_left;
  if (random.chance(15)) drawn.window_left = random.chance(20) ? 0 : random.between(0, drawn.n_k + 5);
  if (random.chance(15)) drawn.window_right = random.chance(20) ? 0 : random.between(0, drawn.n_k + 5);
  if (random.chance(20)) {
    for (std::int64_t s = 0; s < drawn.batch; ++s) {
      const std::int64_t keys = drawn.length_k(s);
      drawn.key_lengths.push_back(static_cast<std::int32_t>(random.chance(15) ? 0 : random.between(0, keys)));
    }
  }
  if (random.chance(20)) drawn.allowed = draw_broadcast(random);
  if (random.chance(25)) drawn.bias = draw_broadcast(random);
  drawn.bias_dtype = random.chance(50) ? DType::f32 : drawn.dtype;
  drawn.lowest_bias = drawn.bias && !drawn.integers && random.chance(25);
}

void draw_scale(Random& random, Case& drawn) {
  const double root = std::sqrt(static_cast<double>(drawn.d));
  if (drawn.integers) {
    // A power of two near 1/sqrt(d): products with it are exact.
    double scale = 1.0;
    while (scale * root > 1.0) scale /= 2;
    drawn.scale = random.chance(50) ? scale : scale / 2;
  } else if (random.chance(40)) {
    drawn.scale = static_cast<double>(random.between(20, 150)) / 100.0 / root;
  }
}

// A scale of any size that is served. Where there is room in the type, q and k are of such sizes that the scores are
// ordinary ones; otherwise the weights are all equal, or (in forward, where no gradient is multiplied by the scale) one
// key takes all.
void draw_extreme_scale(Random& random, Case& drawn) {
  const bool narrow = drawn.dtype == DType::f16;
  const int kind = static_cast<int>(random.below(3));
  const std::int64_t reach = kind == 0 ? (narrow ? 18 : 96) : (narrow ? 40 : 120);
  std::int64_t exponent = random.between(8, reach);
  if (kind == 1 || (kind == 0 && random.chance(50))) exponent = -exponent;
  const bool huge_scores = exponent > 0 && (kind != 0 || drawn.integers);
  if (huge_scores && drawn.pass == Pass::backward) return;
  drawn.extreme_scale = true;
  const double mantissa = 1 + static_cast<double>(random.below(1000)) / 1000;
  drawn.scale = std::ldexp(drawn.integers ? 1.0 : mantissa, static_cast<int>(exponent));
  if (huge_scores) drawn.lowest_bias = false;  // neither swallows the other
  // bias / scale must be exact where everything else is.
  if (drawn.integers) drawn.bias_dtype = DType::f32;
  if (kind != 0 || drawn.integers) return;
  int root = 0;  // of d, in powers of two
  while ((std::int64_t{1} << (2 * root)) < drawn.d) ++root;
  const std::int64_t sum = -exponent - root;
  const std::int64_t half = sum / 2;
  if (drawn.magnitude != 0) drawn.magnitude = std::ldexp(1.0, static_cast<int>(sum - half));
  drawn.magnitude_k = std::ldexp(1.0, static_cast<int>(half));
}

// What lies at the ends of the contract. Drawn last and from numbers of its own.
void draw_extremes(Random& random, Case& drawn) {
  if (drawn.packed) {
    drawn.cu_stride = random.one_of<std::int64_t>({1, 1, 2, 3});
    if (random.chance(15)) drawn.tail_q = random.between(1, 70);
    if (random.chance(15)) drawn.tail_k = random.between(1, 70);
  }
  if (!drawn.key_lengths.empty()) {
    drawn.key_lengths_stride = random.one_of<std::int64_t>({1, 1, 2, 3, 0});
    const std::int32_t least = *std::min_element(drawn.key_lengths.begin(), drawn.key_lengths.end());
    if (drawn.key_lengths_stride == 0) std::fill(drawn.key_lengths.begin(), drawn.key_lengths.end(), least);
  }
  if (drawn.pass == Pass::backward) {
    drawn.nan_in_k = random.chance(4);
    drawn.nan_in_q = random.chance(4);
  }
  if (random.chance(12)) draw_extreme_scale(random, drawn);
  drawn.extreme_bias = drawn.bias && !drawn.integers && !drawn.extreme_scale && random.chance(25);
}

// The rest is a thing of the forward pass, and has mask tensors of one query row.
void draw_rest(Random& random, Case& drawn, const DrawLimits& limits) {
  const bool mean = random.chance(20);
  drawn.rest = limits.rest.value_or(mean && drawn.pass == Pass::forward ? Rest::mean : Rest::drop);
  if (drawn.rest == Rest::drop) return;
  for (std::optional<Broadcast>* mask : {&drawn.allowed, &drawn.bias}) {
    if (*mask) (*mask)->one[2] = true;
  }
  drawn.nan_past_length = !drawn.key_lengths.empty() && random.chance(50);
}

// What kernels serve beyond the plain contract, from numbers of its own as well.
void draw_features(Random& random, Case& drawn) {
  const bool backward = drawn.pass == Pass::backward;
  if (random.chance(25) && drawn.rest == Rest::drop) {  // a mean is for inference
    drawn.dropout = random.one_of({0.1, 0.1, 0.25, 0.5, 0.9, 0.999});
    drawn.dropout_seed = random.bits();
    drawn.dropout_offset = random.bits();
    drawn.dropout_state = random.chance(50);
  }
  if (random.chance(15)) drawn.soft_cap = random.one_of({0.5, 5.0, 30.0, 50.0, 1e4});
  drawn.sinks = random.chance(15);
  drawn.d_lse = backward && random.chance(30);
  drawn.d_bias = backward && drawn.bias && random.chance(70);
  drawn.d_sinks = backward && drawn.sinks && random.chance(80);
}

// Wide heads, which few kernels serve: of forward, where the problem is small. The scale is that of the drawn d.
void draw_wide(Random& random, Case& drawn, const DrawLimits& limits) {
  const bool wide = random.chance(6);
  const std::int64_t products = std::max<std::int64_t>(1, drawn.batch * drawn.heads * drawn.n_q * drawn.n_k);
  if (!wide || drawn.pass == Pass::backward || limits.head_dim || limits.max_work / products < 2 * kMaxHeadDim) return;
  drawn.d = random.between(257, kMaxHeadDim);
  if (random.chance(60)) drawn.d_v = random.between(257, kMaxHeadDim);
}

void draw_choice(Random& random, Case& drawn, const DrawLimits& limits) {
  const bool shared = random.chance(25) && drawn.heads > drawn.kv_heads && !drawn.pattern.is_dense();
  drawn.choice = limits.choice.value_or(shared && drawn.pass == Pass::forward ? Choice::shared : Choice::each_head);
  // A head alone shares nothing.
  if (limits.choice == Choice::shared && drawn.heads == drawn.kv_heads) drawn.heads *= 2;
  if (drawn.choice != Choice::shared) return;
  // Many heads, more than a warp's product has rows.
  constexpr std::uint64_t kManyHeads = 0x6D616E79;
  Random many(drawn.seed ^ (kManyHeads << 32), static_cast<std::uint64_t>(drawn.index));
  const std::int64_t heads = drawn.kv_heads * many.between(17, 40);
  const std::int64_t work = drawn.batch * heads * drawn.n_q * drawn.n_k * (drawn.d + drawn.d_v);
  if (many.chance(20) && work <= limits.max_work) drawn.heads = heads;
}

// Keys of a page, or 0. Drawn only where pages are served: keys are added that fill the last.
std::int64_t draw_page(const Case& drawn) {
  constexpr std::uint64_t kPages = 0x706167;
  Random random(drawn.seed ^ (kPages << 32), static_cast<std::uint64_t>(drawn.index));
  const std::int64_t page = 16 * random.between(1, 4);
  return random.chance(20) && drawn.pass == Pass::forward && !drawn.packed && drawn.n_k > 0 ? page : 0;
}

std::string_view layout_name(Layout layout) {
  return layout == Layout::bhnd ? "bhnd" : layout == Layout::bnhd ? "bnhd" : "padded";
}

std::string shape_name(const Broadcast& broadcast) {
  const char* const names[4] = {"batch", "heads", "n_q", "n_k"};
  std::string text = "[";
  for (std::size_t dim = 0; dim < 4; ++dim) {
    text += dim > 0 ? "," : "";
    text += broadcast.one[dim] ? "1" : names[dim];
    if (!broadcast.one[dim] && broadcast.zero_stride[dim]) text += "*0";
  }
  return text + "]";
}

}  // namespace

std::int64_t Case::length_q(std::int64_t sequence) const {
  const auto s = static_cast<std::size_t>(sequence);
  return packed ? cu_q[s + 1] - cu_q[s] : n_q;
}

std::int64_t Case::length_k(std::int64_t sequence) const {
  const auto s = static_cast<std::size_t>(sequence);
  return packed ? cu_k[s + 1] - cu_k[s] : n_k;
}

Case Case::restricted_to(core::Features served) const {
  Case restricted = *this;
  if (!served.has(core::Feature::dropout)) restricted.dropout = 0;
  if (!served.has(core::Feature::soft_cap)) restricted.soft_cap.reset();
  if (!served.has(core::Feature::sinks)) restricted.sinks = restricted.d_sinks = false;
  if (!served.has(core::Feature::d_sinks)) restricted.d_sinks = false;
  restricted.page = served.has(core::Feature::paged) ? draw_page(restricted) : 0;
  if (restricted.page > 0) restricted.n_k = (n_k + restricted.page - 1) / restricted.page * restricted.page;
  if (!served.has(core::Feature::d_lse)) restricted.d_lse = false;
  if (!served.has(core::Feature::d_bias)) restricted.d_bias = false;
  return restricted;
}

Case draw_case(std::uint64_t seed, std::int64_t index, const DrawLimits& limits) {
  Random random(seed, static_cast<std::uint64_t>(index));
  Case drawn;
  drawn.seed = seed;
  drawn.index = index;
  drawn.pass = random.chance(35) ? Pass::backward : Pass::forward;
  if (limits.rest == Rest::mean || limits.choice == Choice::shared) drawn.pass = Pass::forward;
  if (limits.pass) drawn.pass = *limits.pass;
  drawn.dtype = random.one_of({DType::f32, DType::f16, DType::bf16});
  if (limits.dtype) drawn.dtype = *limits.dtype;
  drawn.pattern = draw_pattern(random);
  if (limits.pattern) drawn.pattern = *limits.pattern;
  drawn.grouping = random.chance(50) ? Grouping::interleaved : Grouping::consecutive;
  if (limits.grouping) drawn.grouping = *limits.grouping;
  if (drawn.grouping == Grouping::interleaved && !drawn.pattern.is_dense() &&
      kInterleaveBlock % drawn.pattern.group != 0) {
    if (limits.grouping) {
      drawn.pattern = {std::min(drawn.pattern.keep, 7), 8};
    } else {
      drawn.grouping = Grouping::consecutive;
    }
  }
  draw_sizes(random, drawn, limits);
  drawn.packed = random.chance(22);
  if (drawn.packed) {
    drawn.cu_q = draw_cumulative(random, drawn.batch, drawn.n_q);
    drawn.cu_k =
        random.chance(40) && drawn.n_q <= drawn.n_k ? drawn.cu_q : draw_cumulative(random, drawn.batch, drawn.n_k);
    drawn.tail_q = random.chance(30) ? random.between(1, 5) : 0;
    drawn.tail_k = random.chance(30) ? random.between(1, 5) : 0;
  }
  drawn.integers = random.chance(25);
  draw_scale(random, drawn);
  draw_mask(random, drawn);
  drawn.fp32_products = random.chance(50) ? Fp32Products::full : Fp32Products::tf32_allowed;
  for (Layout* layout : {&drawn.q_layout, &drawn.k_layout, &drawn.v_layout, &drawn.out_layout}) {
    *layout = random.one_of({Layout::bhnd, Layout::bnhd, Layout::padded});
  }
  drawn.want_lse = drawn.pass == Pass::backward || random.chance(75);
  drawn.nan_in_k = drawn.pass == Pass::forward && random.chance(4);
  drawn.nan_in_q = drawn.pass == Pass::forward && random.chance(4);
  if (drawn.pass == Pass::forward && random.chance(15)) {
    drawn.magnitude = random.one_of({0.0, 64.0, 64.0, 64.0, 4096.0, 4096.0});
    // Larger integers would not be exact in fp16.
    if (drawn.integers && drawn.magnitude > 1) drawn.magnitude = 1;
  }
  // Drawn last, so that the parts above stay what a seed has always given.
  if (random.chance(25)) drawn.offset = random.between(-drawn.n_q - 3, drawn.n_k + 3);
  drawn.fp32_results = drawn.dtype != DType::f32 && random.chance(20);
  constexpr std::uint64_t kExtremes = 0x657874;  // another stream
  Random extremes(seed ^ (kExtremes << 32), static_cast<std::uint64_t>(index));
  draw_extremes(extremes, drawn);
  constexpr std::uint64_t kRest = 0x726573;  // and another
  Random rest(seed ^ (kRest << 32), static_cast<std::uint64_t>(index));
  draw_rest(rest, drawn, limits);
  draw_choice(rest, drawn, limits);
  drawn.value_sums = drawn.rest == Rest::mean && !drawn.packed && rest.chance(60);
  constexpr std::uint64_t kFeatures = 0x666561;
  Random features(seed ^ (kFeatures << 32), static_cast<std::uint64_t>(index));
  draw_features(features, drawn);
  draw_wide(features, drawn, limits);
  return drawn;
}

std::string number(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*g", digits, value);
  return text;
}

std::string describe(const Case& drawn) {
  std::string text = drawn.pass == Pass::forward ? "forward" : "backward";
  const auto add = [&](const std::string& part) { text.append(" ").append(part); };
  add(std::string(name(drawn.dtype)));
  add(to_string(drawn.pattern));
  add(to_string(drawn.grouping));
  add("batch=" + std::to_string(drawn.batch) + " heads=" + std::to_string(drawn.heads) + "/" +
      std::to_string(drawn.kv_heads));
  add("n_q=" + std::to_string(drawn.n_q) + " n_k=" + std::to_string(drawn.n_k));
  add("d=" + std::to_string(drawn.d) + " d_v=" + std::to_string(drawn.d_v));
  if (drawn.packed) {
    const auto list = [](const std::vector<std::int32_t>& values) {
      std::string joined;
      for (const std::int32_t value : values) {
        if (!joined.empty()) joined += ',';
        joined += std::to_string(value);
      }
      return joined;
    };
    add("cu_q=" + list(drawn.cu_q) + " cu_k=" + list(drawn.cu_k));
    if (drawn.cu_stride != 1) add("cu_stride=" + std::to_string(drawn.cu_stride));
    if (drawn.tail_q + drawn.tail_k > 0)
      add("tail=" + std::to_string(drawn.tail_q) + "," + std::to_string(drawn.tail_k));
  }
  if (drawn.rest == Rest::mean) add(drawn.value_sums ? "mean value_sums" : "mean");
  if (drawn.choice == Choice::shared) add("shared");
  if (drawn.page > 0) add("page=" + std::to_string(drawn.page));
  if (drawn.causal) add("causal");
  if (drawn.causal || drawn.window_left || drawn.window_right) {
    add(drawn.alignment == Alignment::bottom_right ? "bottom_right" : "top_left");
    if (drawn.offset != 0) add("offset=" + std::to_string(drawn.offset));
  }
  if (drawn.window_left) add("window_left=" + std::to_string(*drawn.window_left));
  if (drawn.window_right) add("window_right=" + std::to_string(*drawn.window_right));
  if (!drawn.key_lengths.empty()) add("key_lengths");
  if (drawn.key_lengths_stride != 1) add("key_lengths_stride=" + std::to_string(drawn.key_lengths_stride));
  if (drawn.allowed) add("allowed=" + shape_name(*drawn.allowed));
  if (drawn.bias) add("bias=" + std::string(name(drawn.bias_dtype)) + shape_name(*drawn.bias));
  if (drawn.lowest_bias) add("lowest_bias");
  if (drawn.extreme_bias) add("extreme_bias");
  if (drawn.scale) add("scale=" + (drawn.extreme_scale ? number(*drawn.scale) : std::to_string(*drawn.scale)));
  text += " layout=";
  for (const Layout layout : {drawn.q_layout, drawn.k_layout, drawn.v_layout, drawn.out_layout}) {
    if (text.back() != '=') text += ',';
    text += layout_name(layout);
  }
  if (drawn.fp32_results) add("fp32_results");
  if (drawn.integers) add("integers");
  if (drawn.nan_in_k) add("nan_in_k");
  if (drawn.nan_in_q) add("nan_in_q");
  if (drawn.nan_past_length) add("nan_past_length");
  if (drawn.magnitude != 1) add("magnitude=" + number(drawn.magnitude));
  if (drawn.magnitude_k != 1) add("magnitude_k=" + number(drawn.magnitude_k));
  if (drawn.dropout > 0) add("dropout=" + number(drawn.dropout) + (drawn.dropout_state ? " by state" : ""));
  if (drawn.soft_cap) add("soft_cap=" + number(*drawn.soft_cap));
  if (drawn.sinks) add("sinks");
  if (drawn.d_lse) add("d_lse");
  if (drawn.d_bias) add("d_bias");
  if (drawn.d_sinks) add("d_sinks");
  return text;
}

}  // namespace dspattn::check
