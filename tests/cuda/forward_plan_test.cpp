// Plans of the fused forward kernels: every threshold, on both sides, and where it was measured (docs/log/forward.md).
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "cuda/sm90/forward/plan.h"
#include "cuda/sm90/forward_tf32/plan.h"
#include "cuda/tile/head_dims.h"
#include "cuda/tile/schedule.h"

namespace dspattn::cuda::sm90 {
namespace {

using blocks::Selection;

const DeviceFacts kH200{.present = true, .major = 9, .multiprocessors = 132, .shared_bytes = 227 * 1024};

// Stands for a tensor that is never read; 16-byte aligned but for `off` bytes.
void* stand_in(int index, int off = 0) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) * static_cast<std::uintptr_t>(index + 1) +
                                 static_cast<std::uintptr_t>(off));
}

struct Asked {
  std::int64_t n_q = 1024, n_k = 1024, d = 64, heads = 16, batch = 4;
  DType type = DType::bf16;
  Selection selection = Selection::two_of_four;
  bool causal = false;
  bool lengths = false;
  bool bias = false;
  int off = 0;  // bytes that k is off alignment
  std::optional<std::int64_t> window_left = std::nullopt;
  bool mean = false;
  bool fp32 = false;  // results

  Problem problem() const {
    Problem p;
    p.q = {stand_in(0), type, {batch, heads, n_q, d}};
    p.k = {stand_in(1, off), type, {batch, heads, n_k, d}};
    p.v = {stand_in(2), type, {batch, heads, n_k, d}};
    p.pattern = type == DType::f32 ? Pattern{1, 2} : blocks::pattern_of(selection);
    p.mask.causal = causal;
    p.mask.window_left = window_left;
    if (mean) p.rest = Rest::mean;
    if (lengths) p.mask.key_lengths = {stand_in(3), DType::i32, {batch}};
    if (bias) p.mask.bias = {stand_in(4), DType::f32, {1, 1, n_q, n_k}};
    return p;
  }
  int row_dim() const {
    for (const int dim : tile::kHeadDims) {
      if (d <= dim) return dim;
    }
    return 0;
  }
  ForwardPlan plan() const {
    const Problem p = problem();
    TensorView out = contiguous_out(p);
    if (fp32) out.dtype = DType::f32;
    return type == DType::f32 ? tf32::plan_forward(row_dim(), p, out, kH200)
                              : plan_forward({type, selection, row_dim()}, p, out, kH200);
  }
};

// Ladder, "three warpgroups or two": d = 64, 16k tokens, hidden 2048. Full: wide wins from n = 512 on; causal 2:4 only
// from 8192, 1:2 from 1024.
TEST(ForwardPlan, ThreeWarpgroupsFromSoManyRows) {
  EXPECT_EQ((Asked{.n_q = 511, .n_k = 511}.plan().variant), Variant::narrow);
  EXPECT_EQ((Asked{.n_q = 512, .n_k = 512, .heads = 32, .batch = 32}.plan().variant), Variant::wide);
  EXPECT_EQ((Asked{.n_q = 8191, .n_k = 8191, .causal = true}.plan().variant), Variant::narrow);
  EXPECT_EQ((Asked{.n_q = 8192, .n_k = 8192, .causal = true}.plan().variant), Variant::wide);
  const Asked pairs{.n_q = 1023, .n_k = 1023, .selection = Selection::one_of_two, .causal = true};
  EXPECT_EQ(pairs.plan().variant, Variant::narrow);
  Asked longer = pairs;
  longer.n_q = longer.n_k = 1024;
  EXPECT_EQ(longer.plan().variant, Variant::wide);
  EXPECT_EQ(longer.plan().traits.consumers, 3);
}

// docs/log/rest.md, "Three warpgroups under causal masks": 2:4 with the mean, us of 192 and of 128 rows a tile.
TEST(ForwardPlan, ThreeWarpgroupsSoonerWithTheMean) {
  const auto variant = [](std::int64_t n) {
    return Asked{.n_q = n, .n_k = n, .causal = true, .mean = true}.plan().variant;
  };
  EXPECT_EQ(variant(1024), Variant::narrow);  // 256, 247
  EXPECT_EQ(variant(2047), Variant::narrow);
  EXPECT_EQ(variant(2048), Variant::wide);  // 368, 385
  EXPECT_EQ(variant(4096), Variant::wide);  // 621, 641
  EXPECT_EQ(variant(8192), Variant::wide);  // 1097, 1177
  const Asked window{.n_q = 4096, .n_k = 4096, .causal = true, .window_left = 255, .mean = true};
  EXPECT_EQ(window.plan().variant, Variant::narrow);  // 479, 428
}

// docs/log/decode.md, "Small problems": us of 192 and of 128 rows a tile, full, 2:4.
TEST(ForwardPlan, TwoWarpgroupsWhereItemsAreFew) {
  const auto variant = [](std::int64_t heads, std::int64_t n) {
    return Asked{.n_q = n, .n_k = n, .heads = heads, .batch = 1}.plan().variant;
  };
  EXPECT_EQ(variant(12, 512), Variant::narrow);   // 11.3, 8.7
  EXPECT_EQ(variant(12, 1024), Variant::narrow);  // 16.7, 12.5
  EXPECT_EQ(variant(48, 512), Variant::narrow);   // 16.7, 14.4: a second round either way
  EXPECT_EQ(variant(24, 1024), Variant::wide);    // 19.3, 21.0: a second round, of short tiles
  EXPECT_EQ(variant(12, 2048), Variant::wide);    // 27.4, 34.8: one round, two
  EXPECT_EQ(variant(16, 2048), Variant::narrow);  // 48.7, 35.0
  EXPECT_EQ(variant(24, 2048), Variant::wide);    // 49.1, 50.9: two rounds, three
  EXPECT_EQ(variant(4, 4096), Variant::narrow);   // 46.8, 33.4
  EXPECT_EQ(variant(8, 4096), Variant::narrow);   // 89.0, 62.6
  EXPECT_EQ(variant(12, 4096), Variant::wide);    // 88.9, 91.7
  const Asked pairs{.n_q = 1024, .n_k = 1024, .heads = 12, .batch = 1, .selection = Selection::one_of_two};
  EXPECT_EQ(pairs.plan().variant, Variant::narrow);  // 14.6, 11.4
}

// Ladder, "a variant for full attention": d = 96 and 128, whole key blocks, more than two of them.
TEST(ForwardPlan, FullVariantWhereEveryRowSeesAllWholeBlocks) {
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 1024, .d = 128}.plan().variant), Variant::full);
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 1024, .d = 90}.plan().variant), Variant::general);  // rows of 180 bytes
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 1024, .d = 88}.plan().variant), Variant::full);
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 1000, .d = 128}.plan().variant), Variant::narrow);
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 256, .d = 128}.plan().variant), Variant::narrow);
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 384, .d = 128}.plan().variant), Variant::full);
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 1024, .d = 128, .causal = true}.plan().variant), Variant::narrow);
  EXPECT_EQ((Asked{.n_q = 1024, .n_k = 1024, .d = 128, .lengths = true}.plan().variant), Variant::narrow);
}

// Results in fp32 leave from registers: the full variant, whose results leave by TMA, has no way for them. All else is
// as it is without.
TEST(ForwardPlan, ResultsInFp32) {
  const ForwardPlan plan = Asked{.d = 128, .fp32 = true}.plan();
  EXPECT_EQ(plan.variant, Variant::narrow);
  EXPECT_FALSE(plan.tma_out);
  EXPECT_TRUE(plan.pairs);
  EXPECT_EQ((Asked{.fp32 = true}.plan().variant), Variant::wide);
  EXPECT_EQ((Asked{.causal = true, .fp32 = true}.plan().variant), (Asked{.causal = true}.plan().variant));
  EXPECT_EQ((Asked{.bias = true, .fp32 = true}.plan().variant), Variant::general);
  EXPECT_EQ((Asked{.d = 128, .mean = true, .fp32 = true}.plan().variant), Variant::narrow);
  EXPECT_TRUE((Asked{.d = 128, .type = DType::f32}.plan().tma_out));
}

// docs/rest.md, "What is compiled": head dims 64, 128 and 256, three warpgroups for bf16, key tiles of 64 for fp16.
TEST(ForwardPlan, MeansHaveFewerKernels) {
  const auto plan_of = [](Asked asked) {
    asked.mean = true;
    return asked.plan();
  };
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 96}).traits.dim, 128);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 96}).variant, Variant::full);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 32}).traits.dim, 64);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 192}).traits.dim, 256);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024}).variant, Variant::wide);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .type = DType::f16}).variant, Variant::narrow);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .selection = Selection::one_of_two}).variant, Variant::wide);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 128, .type = DType::f16}).variant, Variant::narrow);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 128, .type = DType::f16}).traits.tile_k, 64);
  EXPECT_EQ(plan_of({.n_q = 1024, .n_k = 1024, .d = 60}).traits.dim, 128);  // rows of 120 bytes: the general variant
}

// The table of means lies behind the schedule, and is part of the workspace.
TEST(ForwardPlan, WorkspaceOfMeans) {
  const ForwardPlan dropped = Asked{.causal = true, .lengths = true}.plan();
  EXPECT_FALSE(dropped.means.present);
  const ForwardPlan plan = Asked{.causal = true, .lengths = true, .mean = true}.plan();
  EXPECT_TRUE(plan.means.present);
  EXPECT_EQ(plan.means.heads, 16);
  EXPECT_GE(plan.means.begin, dropped.workspace_bytes);
  EXPECT_EQ(plan.means.begin % 256, 0u);
  EXPECT_EQ(plan.means.table.entries, 4 * (8 + 127));
  EXPECT_EQ(plan.workspace_bytes, plan.means.begin + tile::means_bytes(plan.means.table, 16, 64).total);
}

// Ladder, "pairs of CTAs": full attention with an even number of row tiles; causal with two row tiles (+2 to 3 %) or
// from 32 on (+1 to 4 %), not with 4 or 8 (-2 to -4 %); lengths of 512 rows and more on average, an even number of
// heads.
TEST(ForwardPlan, PairsOfCtas) {
  const auto pairs = [](std::int64_t n, bool causal) {
    return Asked{.n_q = n, .n_k = n, .d = 128, .causal = causal}.plan().pairs;
  };
  EXPECT_TRUE(pairs(1024, false));
  EXPECT_FALSE(pairs(128 * 3, false));
  EXPECT_TRUE(pairs(256, true));
  EXPECT_FALSE(pairs(512, true));
  EXPECT_FALSE(pairs(1024, true));
  EXPECT_FALSE(pairs(128 * 31, true));
  EXPECT_TRUE(pairs(128 * 32, true));
  Asked windowed{.n_q = 4096, .n_k = 4096, .d = 128, .window_left = 100};
  EXPECT_FALSE(windowed.plan().pairs);
  const auto of_lengths = [](std::int64_t n, std::int64_t heads) {
    return Asked{.n_q = n, .n_k = n, .d = 128, .heads = heads, .lengths = true}.plan().pairs;
  };
  EXPECT_TRUE(of_lengths(512, 16));
  EXPECT_FALSE(of_lengths(511, 16));
  EXPECT_FALSE(of_lengths(512, 15));
  EXPECT_FALSE((Asked{.d = 64}.plan().pairs));  // one panel: nothing to share
}

// Ladder, "as few pairs as do it": where all items are alike, no more CTAs than the last round needs, and launches
// overlap.
TEST(ForwardPlan, AsManyCtasAsTheRoundsNeed) {
  // 4 * 16 heads * 4 items of 256 rows = 256 items: 66 pairs need 4 rounds, and so do 64.
  const ForwardPlan plan = Asked{.n_q = 1024, .n_k = 1024, .d = 128}.plan();
  EXPECT_EQ(plan.items, 256);
  EXPECT_EQ(plan.ctas, 128);
  EXPECT_TRUE(plan.overlaps);
  EXPECT_EQ(plan.threads, 384);
  // Causal, one CTA an item, all multiprocessors.
  const ForwardPlan causal = Asked{.n_q = 1024, .n_k = 1024, .d = 128, .causal = true}.plan();
  EXPECT_EQ(causal.ctas, 132);
  EXPECT_FALSE(causal.overlaps);
  EXPECT_EQ((Asked{.n_q = 1, .n_k = 64, .heads = 3, .batch = 1}.plan().ctas), 3);
}

// Ladder, "all row tiles of a head at once": causal, d > 64, up to 8 row tiles (8 to 15 % faster), not at d = 64 (up to
// 15 % slower).
TEST(ForwardPlan, OrderOfItems) {
  EXPECT_EQ((Asked{.d = 128, .causal = true}.plan().walk), Walk::mirrored);
  EXPECT_EQ((Asked{.n_q = 128 * 9, .n_k = 128 * 9, .d = 128, .causal = true}.plan().walk), Walk::by_sections);
  EXPECT_EQ((Asked{.d = 64, .causal = true}.plan().walk), Walk::by_sections);
  EXPECT_EQ((Asked{.d = 64}.plan().walk), Walk::head_by_head);
  EXPECT_EQ((Asked{.n_q = 64, .d = 64, .causal = true}.plan().walk), Walk::head_by_head);  // one row tile
  const ForwardPlan scheduled = Asked{.lengths = true}.plan();
  EXPECT_EQ(scheduled.walk, Walk::schedule);
  EXPECT_EQ(scheduled.workspace_bytes, tile::schedule_bytes(4 * 8));
  EXPECT_EQ((Asked{.lengths = true, .bias = true}.plan().walk), Walk::by_sections);
}

// What only the general variant serves, and that the reason says so.
TEST(ForwardPlan, GeneralVariant) {
  const ForwardPlan masked = Asked{.bias = true}.plan();
  EXPECT_EQ(masked.variant, Variant::general);
  EXPECT_EQ(masked.reason, "mask tensors");
  EXPECT_TRUE(masked.tma_masks);
  EXPECT_FALSE((Asked{.n_q = 64, .n_k = 63, .bias = true}.plan().tma_masks));
  const ForwardPlan unaligned = Asked{.off = 2}.plan();
  EXPECT_EQ(unaligned.variant, Variant::general);
  EXPECT_FALSE(unaligned.tma_k);
  EXPECT_TRUE(unaligned.tma_v);
  EXPECT_EQ((Asked{.n_q = 128, .d = 40, .off = 2}.plan().traits.dim), 64);
  EXPECT_EQ((Asked{.n_q = 128, .d = 200, .off = 2}.plan().traits.dim), 256);
}

// Ladder, "masked blocks first": full attention over partial blocks, and causal items of one or two key blocks where
// pairs are possible; those also do with a stage less.
TEST(ForwardPlan, OrderOfKeyBlocks) {
  EXPECT_TRUE((Asked{.n_k = 1000}.plan().descending));
  EXPECT_FALSE((Asked{.n_k = 1024}.plan().descending));
  EXPECT_FALSE((Asked{.n_k = 1000, .causal = true}.plan().descending));
  const ForwardPlan causal = Asked{.n_q = 256, .n_k = 256, .d = 128, .causal = true}.plan();
  EXPECT_TRUE(causal.descending && causal.short_items);
  EXPECT_EQ(causal.stages, causal.traits.stages - 1);
  EXPECT_FALSE((Asked{.n_q = 384, .n_k = 384, .d = 128, .causal = true}.plan().short_items));
  EXPECT_FALSE((Asked{.n_k = 1000, .d = 256}.plan().descending));  // registers
}

// At d = 256 the general kernel is faster where nothing is masked and its tiles of 128 rows fill the card, and under a
// diagonal where they fill it several times: 791 us beside 809 at n = 2048, 268 beside 229 at 1024.
TEST(ForwardPlan, Tf32YieldsAtD256) {
  const Asked full{.n_q = 512, .n_k = 512, .d = 256, .heads = 4, .batch = 8, .type = DType::f32};
  const auto yields = [](const Asked& asked) { return tf32::yields(asked.row_dim(), asked.problem(), kH200); };
  EXPECT_TRUE(yields(full));
  Asked narrower = full, shorter = full, fewer = full, causal = full, windowed = full, lengths = full, biased = full;
  narrower.d = 192;
  shorter.n_k = 511;
  fewer.batch = 7;
  causal.causal = lengths.lengths = biased.bias = true;
  windowed.window_left = 100;
  for (const Asked& asked : {narrower, shorter, fewer, causal, windowed, lengths, biased}) EXPECT_FALSE(yields(asked));
  Asked longer = causal;
  longer.n_q = longer.n_k = 2048;
  EXPECT_TRUE(yields(longer));
  Asked single = longer, oblong = longer;
  single.batch = 1;
  oblong.n_k = 4096;
  for (const Asked& asked : {single, oblong}) EXPECT_FALSE(yields(asked));
}

// tf32: three warpgroups at d = 64 once every multiprocessor has two items of 192 rows.
TEST(ForwardPlan, Tf32) {
  const auto plan = [](std::int64_t batch, std::int64_t d) {
    return Asked{.n_q = 192, .n_k = 192, .d = d, .heads = 2, .batch = batch, .type = DType::f32}.plan();
  };
  EXPECT_EQ(plan(131, 64).variant, Variant::narrow);
  EXPECT_EQ(plan(132, 64).variant, Variant::wide);
  EXPECT_EQ(plan(132, 128).variant, Variant::narrow);
  EXPECT_EQ(plan(1, 256).traits.consumers, 1);
}

// Every compiled kernel has a narrow and a general variant whose numbers make sense, and a plan can be printed.
TEST(ForwardPlan, EveryKernel) {
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const Selection selection : {Selection::two_of_four, Selection::one_of_two}) {
      for (const int dim : tile::kHeadDims) {
        for (const Variant variant : {Variant::narrow, Variant::general}) {
          const VariantTraits traits = traits_of({type, selection, dim}, variant);
          EXPECT_TRUE(traits.compiled && traits.dim >= dim && traits.stages >= 2);
          EXPECT_EQ(traits.tile_q, 64 * traits.consumers);
        }
      }
    }
  }
  const std::string text = to_string(Asked{.d = 128}.plan());
  for (const char* part : {"full", "128 CTAs of 384 threads", "clusters of 2", "head by head", "all whole"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

}  // namespace
}  // namespace dspattn::cuda::sm90
