// Heads that share keys and choose together, one query of up to eight heads: from scores to weights everything is in
// registers (g = lane / 4, t = lane % 4), but that scores of all keys are kept in between (together_kernels.h).
//
// A lane has a row and group t of every four of a tile, as the score product leaves them (weigh16.h), and its heads lie
// four lanes apart: sums over heads are shuffles. Where there are at most four heads Q's rows are there twice, so that
// lanes of g < 4 have the first half of a tile's groups and the others the second. Each half's weights are 0 in the
// other's product with V, and in the end both halves' results are added.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/together.h"

namespace dspattn::cuda::decode {

template <typename C>
struct TogetherRows {
  using Rows = RegisterRows<C>;
  using Operands = typename Rows::Operands;
  static constexpr int kQuads = Rows::kQuads;
  static constexpr int kOwn = kQuads / 2;           // of a half
  static constexpr int kPlaces = 2 * kChoiceTiles;  // of V tiles: a step's are on their way beside those asked for
  // Weights in fp16 have few small numbers: of shares of a long row these are too few.
  static constexpr float kShareScaleLog2 = C::kType == DType::bf16 ? 0 : 15;
  static constexpr float kShareScale = C::kType == DType::bf16 ? 1 : 32768;
  // Of a team's part of a row: weights of which sums are less may have lost bits.
  static constexpr float kLeastShare = C::kType == DType::bf16 ? 0x1p-60f : 0x1p-3f;

  // Compared scores of a half of a tile: of its groups the four elements.
  struct alignas(8 * kOwn) HalfScores {
    std::uint32_t groups[kOwn][2];
  };
  // A word for each of the tile's groups that are this lane's: the weights of the two kept keys.
  struct Weights {
    std::uint32_t groups[kQuads] = {};
  };
  enum class Walk { shares, largest, careful };  // careful: weights are relative to the largest kept score

  Team<C>& team;
  Rows& products;
  const int halves;        // of a tile that a lane has
  HalfScores* const kept;  // of this lane, of the team's first tile: one for each half
  const int kept_step;     // to those of the team's next tile
  const int g, t;
  const bool halved;
  const int row;
  const bool has_row;
  bool hides = false;           // some key of these tiles is hidden
  float reference = -INFINITY;  // of this lane alone, until scores are joined
  float sum = 0, rest = 0;

  // first: where the scores of the team's first tile are kept, and how many tiles it is to those of its next.
  __device__ __forceinline__ TogetherRows(Team<C>& own_team, Rows& rows, void* first, int tiles)
      : team(own_team),
        products(rows),
        halves(own_team.p.teams.rows <= 4 ? 1 : 2),
        kept(static_cast<HalfScores*>(first) + own_team.lane),
        kept_step(32 * halves * tiles),
        g(own_team.lane >> 2),
        t(own_team.lane & 3),
        halved(halves == 1),
        row(g & (own_team.p.teams.rows - 1)),
        has_row(row < own_team.part.rows) {}

  // Calls visit(half, i) for every half i that is this lane's.
  template <typename Visit>
  __device__ __forceinline__ void each_half(Visit visit) const {
#pragma unroll 1
    for (int i = 0; i < halves; ++i) visit(halved ? g >> 2 : i, i);
  }
  // Of the team's tile `number`.
  struct TileScores {
    HalfScores first, second;  // the second where a lane has both
  };
  __device__ __forceinline__ TileScores scores_of(int number) const {
    const HalfScores* from = kept + static_cast<std::int64_t>(kept_step) * number;
    return {from[0], halved ? HalfScores{} : from[32]};
  }

  // ---- Scores ----

  // Of a group, masked; `first`: key of its first element.
  __device__ __forceinline__ uint2 masked(const float (&low)[2], const float (&high)[2], int first) const {
    const Params& p = team.p;
    const bool plain = t < 2;  // see tile::row_of_column()
    const float4 raw = make_float4(plain ? low[0] : high[0], plain ? low[1] : high[1], plain ? high[0] : low[0],
                                   plain ? high[1] : low[1]);
    const int batch = team.part.batch;
    const int head = team.part.kv_head * p.heads_per_kv_head + min(row, team.part.rows - 1);
    const float4 x =
        mask_group<C>(p, raw, first, products.begin, products.end, batch, MaskRow(p.allowed, 1, batch, head, 0),
                      MaskRow(p.bias, p.bias_bytes, batch, head, 0));
    return {ptx::pack_f16x2(x.x, x.y), ptx::pack_f16x2(x.z, x.w)};
  }
  // Hides what lies outside of the keys that are seen.
  __device__ __forceinline__ uint2 bordered(uint2 x, int first, int block) const {
    const auto width = static_cast<unsigned>(max(products.end - products.begin, 0));
    const uint4 y = hide_outside(team.p, make_uint4(x.x & 0xFFFFu, x.x >> 16, x.y & 0xFFFFu, x.y >> 16), first, block,
                                 team.weigher.page, {{products.begin, products.begin}, {width, width}});
    return {(y.x & 0xFFFFu) | y.y << 16, (y.z & 0xFFFFu) | y.w << 16};
  }

  // Compared scores of the groups of a half.
  __device__ __forceinline__ HalfScores compare(const float (&scores)[2 * kQuads][4], int half, int index,
                                                bool interior) const {
    const int block = block_of<C>(index);
    const float unit = team.p.scales.unit;
    HalfScores words;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      float low[2], high[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        low[i] = half == 0 ? scores[2 * own][i] : scores[2 * (kOwn + own)][i];
        high[i] = half == 0 ? scores[2 * own + 1][i] : scores[2 * (kOwn + own) + 1][i];
      }
      const int first = block + team.p.keys.key(part_of<C>(index), 4 * (half * kOwn + own) + t, 0);
      const std::uint32_t x = ptx::pack_f16x2_clamped(low[0] * unit, low[1] * unit);
      const std::uint32_t y = ptx::pack_f16x2_clamped(high[0] * unit, high[1] * unit);
      uint2 word = {t < 2 ? x : y, t < 2 ? y : x};
      if (!interior) word = team.weigher.plain ? bordered(word, first, block) : masked(low, high, first);
      words.groups[own][0] = has_row ? word.x : Rows::kHidden;
      words.groups[own][1] = has_row ? word.y : Rows::kHidden;
    }
    return words;
  }

  // Adds up the weights of a half, relative to the largest score of this lane.
  __device__ __forceinline__ void add_up(const HalfScores& words) {
    std::uint32_t both = Rows::kHidden;
#pragma unroll
    for (const auto& x : words.groups) both = ptx::max_f16x2(both, ptx::max_f16x2(x[0], x[1]));
    float even, odd;
    ptx::unpack_f16x2(both, even, odd);
    const float exponent = team.p.scales.exponent;
    const float raised = fmaxf(reference, fmaxf(even, odd));
    const float from = raised == -INFINITY ? 0.0f : raised;
    sum *= ptx::exp2_fast((reference - from) * exponent);
    reference = raised;
#pragma unroll
    for (const auto& pair : words.groups) {
#pragma unroll
      for (const std::uint32_t word : pair) {
        ptx::unpack_f16x2(word, even, odd);
        sum += ptx::exp2_fast((even - from) * exponent) + ptx::exp2_fast((odd - from) * exponent);
      }
    }
  }

  // Scores of all of the team's tiles, after begin_keys(); `keeps`: for the choice.
  __device__ __forceinline__ void score(bool keeps = true) {
    reference = -INFINITY;
    sum = 0;
    int index = team.first_tile();
    for (int number = 0; index < team.part.tiles.end; ++number, index += team.step()) {
      const int block = block_of<C>(index);
      team.weigher.look_up(block);
      ptx::cp_async_wait<1>();  // K(i + 1) may still be on its way
      team.sync();
      float scores[2 * kQuads][4];
      products.score(team.place(number & 1), scores);
      team.load_k(index + 2 * team.step(), team.place(number & 1));
      const bool interior = team.weigher.plain && team.weigher.pages_are_there() && products.begin <= block &&
                            block + tile::kBlockKeys <= products.end;
      hides = hides || (keeps && !interior);
      each_half([&](int half, int i) {
        const HalfScores words = compare(scores, half, index, interior);
        if (keeps) kept[static_cast<std::int64_t>(kept_step) * number + 32 * i] = words;
        add_up(words);
      });
    }
  }

  // Adds a number of all lanes that have a part of a row.
  template <typename Join>
  __device__ __forceinline__ float over_lanes(float x, Join join) const {
    x = join(x, __shfl_xor_sync(~0u, x, 1));
    x = join(x, __shfl_xor_sync(~0u, x, 2));
    const float other = __shfl_xor_sync(~0u, x, 16);
    return halved ? join(x, other) : x;
  }
  __device__ __forceinline__ static float added(float a, float b) { return a + b; }

  // Of this lane's row by this warp's keys, in all lanes that have a part of the row.
  __device__ __forceinline__ ToldStats own_stats() const {
    const float largest = over_lanes(reference, [](float a, float b) { return fmaxf(a, b); });
    const float own = sum == 0 ? 0.0f : sum * ptx::exp2_fast((reference - largest) * team.p.scales.exponent);
    return {largest, over_lanes(own, added)};
  }
  // Tells the cluster's CTAs.
  __device__ __forceinline__ void tell(const Mail<C>& mail) const {
    const ToldStats own = own_stats();
    const int ctas = team.p.cluster.value, warp = mail.cta() * team.p.teams.count + team.team;
    if (ctas == 1) {
      if (t == 0 && g == row) *mail.told(warp, row) = own;
      return;
    }
    for (int base = 0; base < ctas * team.p.teams.rows; base += 32) {
      const int item = base + team.lane, told_row = item & (team.p.teams.rows - 1);
      const float largest = __shfl_sync(~0u, own.reference, 4 * told_row),
                  total = __shfl_sync(~0u, own.sum, 4 * told_row);
      const int to = item >> (5 - team.p.lane_shift);
      if (to < ctas) {
        ptx::send_8(ptx::shared_address(mail.told(warp, told_row)), largest, total, mail.arrived(0),
                    static_cast<std::uint32_t>(to));
      }
    }
  }
  // Joins the stats of this lane's row by all warps of the unit, of which told(i) is that of warp i: what shares are
  // computed from, 2^(exponent * (score - reference)) / sum. A lane has kAtOnce of them on their way.
  template <int kAtOnce, typename Told>
  __device__ __forceinline__ RowStats whole_row(int warps, Told told) const {
    const float exponent = team.p.scales.exponent;
    const int first = halved ? t + (g & 4) : t, step = halved ? 8 : 4;
    ToldStats joined{-INFINITY, 0};
#pragma unroll 1
    for (int base = first; base < warps; base += kAtOnce * step) {
      ToldStats parts[kAtOnce];
      float largest = joined.reference;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) parts[i] = told(min(base + i * step, warps - 1));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, parts[i].reference);
      joined.sum *= part_factor(joined, largest, exponent);
      joined.reference = largest;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i * step < warps) joined.sum += parts[i].sum * part_factor(parts[i], largest, exponent);
      }
    }
    const float largest = over_lanes(joined.reference, [](float a, float b) { return fmaxf(a, b); });
    const float own = joined.sum * part_factor(joined, largest, exponent);
    return shifted({largest, over_lanes(own, added)}, exponent);
  }

  // ---- Choice ----

  // A key's share is 2^(exponent * score + shift): above 0 of a visible one, 0 of a hidden one and of lanes without a
  // row. None of these takes a slot from one of those.
  __device__ __forceinline__ void shares_of(const HalfScores& words, float shift, float least, float (&scores)[kOwn][4],
                                            float (*shares)[4]) const {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      ptx::unpack_f16x2(words.groups[own][0], scores[own][0], scores[own][1]);
      ptx::unpack_f16x2(words.groups[own][1], scores[own][2], scores[own][3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        shares[own][e] = ptx::exp2_fast(fmaxf(fmaf(scores[own][e], team.p.scales.exponent, shift), least));
      }
    }
  }
  __device__ __forceinline__ static void hide(const float (&scores)[kOwn][4], float (&shares)[kOwn][4]) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
#pragma unroll
      for (int e = 0; e < 4; ++e) shares[own][e] = scores[own][e] == -INFINITY ? 0.0f : shares[own][e];
    }
  }
  // The same bits in the lanes of all heads.
  template <int kGroups>
  __device__ __forceinline__ void sum_over_heads(const float (&shares)[kGroups][4], float (&sums)[kGroups][4]) const {
    const auto add = [&](const float(&to)[kGroups][4], int offset) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[group][e] = to[group][e] + __shfl_xor_sync(~0u, to[group][e], offset);
      }
    };
    add(shares, 4);
    add(sums, 8);
    if (!halved) add(sums, 16);
  }

  // Chooses the keys of a tile: their weights, and the codes of this lane's groups, those of group 4 q + t in byte q.
  // Walk::largest: raises the reference alone.
  __device__ __forceinline__ std::uint32_t choose(const TileScores& own_scores, Walk walk, float shift, float least,
                                                  Weights& weights) {
    std::uint32_t codes = 0;
    each_half([&](int half, int i) {
      const HalfScores words = i == 0 ? own_scores.first : own_scores.second;
      float scores[kOwn][4], shares[kOwn][4], sums[kOwn][4];
      shares_of(words, shift, least, scores, shares);
      if (hides) hide(scores, shares);
      sum_over_heads(shares, sums);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const tile::ChosenOfFour chosen = tile::choose_of_four(sums[own], team.p.pairs != 0);
        std::uint32_t code = chosen.code();
        if (hides) {
          code |= (chosen.first(sums[own]) == 0 ? 16u : 0u) | (chosen.second(sums[own]) == 0 ? 32u : 0u);
        }
        codes |= code << (8 * (half * kOwn + own));
        float first = chosen.first(shares[own]) * kShareScale, second = chosen.second(shares[own]) * kShareScale;
        if (walk != Walk::shares) {
          const float a = chosen.first(scores[own]), b = chosen.second(scores[own]);
          if (walk == Walk::largest) {
            reference = fmaxf(reference, fmaxf(a, b));
            continue;
          }
          const float from = reference == -INFINITY ? 0.0f : reference;
          first = ptx::exp2_fast((a - from) * team.p.scales.exponent);
          second = ptx::exp2_fast((b - from) * team.p.scales.exponent);
        }
        sum += first + second;
        if (team.p.keeps_rest()) {
          const float pruned = chosen.left_out(shares[own]) * kShareScale;
          sum += pruned;
          rest += pruned;
        }
        const std::uint32_t word =
            C::kType == DType::bf16 ? ptx::pack_bf16x2(first, second) : ptx::pack_f16x2(first, second);
        weights.groups[own] = half == 0 ? word : weights.groups[own];
        weights.groups[kOwn + own] = half == 0 ? weights.groups[kOwn + own] : word;
      }
    });
    return halved ? codes | __shfl_xor_sync(~0u, codes, 16) : codes;
  }

  // The same of kTiles tiles by shares, where no key of these is hidden and pruned ones do not count: without branches,
  // so that a group's instructions fill the time that another's take. `codes` are 0 before.
  template <int kTiles, bool kHalved = false>
  __device__ __forceinline__ void choose_plainly(const TileScores (&own_scores)[kChoiceTiles], float shift, float least,
                                                 Weights (&weights)[kChoiceTiles],
                                                 std::uint32_t (&codes)[kChoiceTiles]) {
    constexpr int kGroups = kTiles * kOwn;
    const auto visit = [&](int half, int i) {
      float shares[kGroups][4], sums[kGroups][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const HalfScores words = i == 0 ? own_scores[tile].first : own_scores[tile].second;
        float scores[kOwn][4];
        shares_of(words, shift, least, scores, shares + tile * kOwn);
      }
      sum_over_heads(shares, sums);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int own = group % kOwn;
        const tile::ChosenOfFour chosen = tile::choose_of_four(sums[group], team.p.pairs != 0);
        const float first = chosen.first(shares[group]) * kShareScale;
        const float second = chosen.second(shares[group]) * kShareScale;
        sum += first + second;
        const std::uint32_t word =
            C::kType == DType::bf16 ? ptx::pack_bf16x2(first, second) : ptx::pack_f16x2(first, second);
        std::uint32_t(&packed)[kQuads] = weights[group / kOwn].groups;
        packed[own] = half == 0 ? word : packed[own];
        packed[kOwn + own] = half == 0 ? packed[kOwn + own] : word;
        codes[group / kOwn] |= chosen.code() << (8 * (half * kOwn + own));
      }
    };
    kHalved ? visit(g >> 2, 0) : each_half(visit);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (kHalved || halved) codes[i] |= __shfl_xor_sync(~0u, codes[i], 16);
    }
  }

  // Asks for the kept rows of V of tile `index`.
  __device__ __forceinline__ void gather(int index, std::uint32_t to, std::uint32_t codes) const {
    if (team.gathers_plainly()) {
      team.gather_of_lanes(index, to, codes);
      return;
    }
    std::uint8_t* bytes = team.tiles.codes;
    if (g == 0) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) bytes[4 * quad + t] = static_cast<std::uint8_t>(codes >> (8 * quad));
    }
    team.sync();  // codes are written
    team.gather_other(index, to, bytes);
    team.sync();  // and read
  }

  __device__ __forceinline__ std::uint32_t v_tile(int number) const {
    return team.ring + static_cast<std::uint32_t>(number % kPlaces * team.layout.v_bytes);
  }
  __device__ __forceinline__ void accumulate(const Weights& weights, int number) const {
    Operands operands = {};
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) operands.weights[quad / 2][2 * (quad % 2)] = weights.groups[quad];
    products.accumulate_gathered(operands, v_tile(number));
  }

  // All of the team's tiles, kChoiceTiles a step: their V is used a step later.
  __device__ __forceinline__ void walk_tiles(Walk walk, float shift) {
    const float least = has_row ? -126.0f : -INFINITY;  // of finite numbers' exponents
    const int range = team.part.tiles.end - team.first_tile();
    const int tiles = range <= 0 ? 0 : (range - 1) / team.step() + 1;
    const bool plain = walk == Walk::shares && !hides && !team.p.keeps_rest();
    Weights weights[kChoiceTiles], before[kChoiceTiles];
    TileScores next[kChoiceTiles] = {};
    const auto load = [&](int number) {
#pragma unroll
      for (int i = 0; i < kChoiceTiles; ++i) {
        if (number + i < tiles) next[i] = scores_of(number + i);
      }
    };
    const auto accumulate_step = [&](int number) {
      team.sync();
#pragma unroll
      for (int i = 0; i < kChoiceTiles; ++i) {
        if (number + i < tiles) accumulate(before[i], number + i);
      }
      team.sync();  // V is read
    };
    load(0);
    const bool straight = plain && halved && team.gathers_plainly() && team.p.pages.table == nullptr;
    int number = 0;
#pragma unroll 1
    for (; number < tiles; number += kChoiceTiles) {
      std::uint32_t codes[kChoiceTiles] = {};
      const TileScores own[kChoiceTiles] = {next[0], next[1]};
      load(number + kChoiceTiles);
      if (straight && number + 1 < tiles) {
        choose_plainly<2, true>(own, shift, least, weights, codes);
        team.gather_seen(team.first_tile() + number * team.step(), v_tile(number), codes[0]);
        team.gather_seen(team.first_tile() + (number + 1) * team.step(), v_tile(number + 1), codes[1]);
      } else if (!plain) {
#pragma unroll 1
        for (int i = 0; i < min(kChoiceTiles, tiles - number); ++i) {
          const TileScores these = i == 0 ? own[0] : own[1];
          Weights found;
          const std::uint32_t code = choose(these, walk, shift, least, found);
          codes[0] = i == 0 ? code : codes[0];
          codes[1] = i == 0 ? codes[1] : code;
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            weights[0].groups[quad] = i == 0 ? found.groups[quad] : weights[0].groups[quad];
            weights[1].groups[quad] = i == 0 ? weights[1].groups[quad] : found.groups[quad];
          }
        }
        if (walk == Walk::largest) continue;
      } else if (number + 1 < tiles) {
        choose_plainly<2>(own, shift, least, weights, codes);
      } else {
        choose_plainly<1>(own, shift, least, weights, codes);
      }
#pragma unroll 1
      for (int i = straight && number + 1 < tiles ? kChoiceTiles : 0; i < min(kChoiceTiles, tiles - number); ++i) {
        gather(team.first_tile() + (number + i) * team.step(), v_tile(number + i), i == 0 ? codes[0] : codes[1]);
      }
      ptx::cp_async_commit();
      if (number > 0) {
        ptx::cp_async_wait<1>();  // this step's V may still be on its way
        accumulate_step(number - kChoiceTiles);
      }
#pragma unroll
      for (int i = 0; i < kChoiceTiles; ++i) before[i] = weights[i];
    }
    ptx::cp_async_wait<0>();
    if (number > 0 && walk != Walk::largest) accumulate_step(number - kChoiceTiles);
  }

  // Chooses all of the team's keys and adds up their V. `whole`: of this lane's row, over all visible keys, shifted().
  // Shares are good weights but where a row keeps next to nothing of its own, which others chose away: then they are
  // beyond the range of the inputs' type, and everything is done again with care, relative to what is kept.
  __device__ __forceinline__ void choose_all(const RowStats& whole) {
    const float shift = has_row ? whole.reference : 0.0f;
    const auto begin = [&](float from) {
      reference = from;
      // A NaN among a row's scores shows in its results, whatever is chosen.
      sum = has_row && std::isnan(whole.sum) ? NAN : 0.0f;
      rest = 0;
    };
    begin(-(shift + kShareScaleLog2) / team.p.scales.exponent);
    Walk walk = Walk::shares;
#pragma unroll 1
    for (;;) {
      walk_tiles(walk, shift);
      if (walk == Walk::careful) return;
      if (walk == Walk::shares) {
        // With rest = mean results are relative to all keys' weights, of which these are what they are.
        const float total = over_lanes(sum, added);
        if (team.p.keeps_rest() || __all_sync(~0u, !(total > 0 && total < kLeastShare)) != 0) return;
        for (auto& o : team.products.out) {
          for (float& x : o) x = 0;
        }
        begin(-INFINITY);
        walk = Walk::largest;
      } else {
        reference = over_lanes(reference, [](float a, float b) { return fmaxf(a, b); });
        walk = Walk::careful;
      }
    }
  }

  // Adds up both halves' results and leaves the rows' stats where the CTA joins them: those of the warp.
  __device__ __forceinline__ void deposit_results(RowStats* stats) const {
    const float total = over_lanes(sum, added), pruned = over_lanes(rest, added);
    if (t == 0 && g < team.p.teams.rows) stats[g] = {reference, total, pruned};
    if (!halved) return;
#pragma unroll
    for (auto& o : team.products.out) {
      o[0] += __shfl_xor_sync(~0u, o[0], 16);
      o[1] += __shfl_xor_sync(~0u, o[1], 16);
    }
  }
};

}  // namespace dspattn::cuda::decode
