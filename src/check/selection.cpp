#include "check/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "check/rounding.h"
#include "check/row_walk.h"
#include "core/geometry.h"

namespace dspattn::check {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A weight below this, relative to the largest of its row, may vanish: a kernel may hold weights in fp16 (smallest
// subnormal 2^-24), or in fp32 (2^-126) before the division by the row's sum.
double smallest_visible_weight(DType dtype) { return dtype == DType::f32 ? 0x1p-90 : 0x1p-20; }

std::string place(const CaseData& data, std::int64_t row, std::int64_t key) {
  const std::int64_t rows = data.host_problem().q.extent(2);
  const std::int64_t heads = data.host_problem().q.extent(1);
  return "batch " + std::to_string(row / rows / heads) + " head " + std::to_string(row / rows % heads) + " query row " +
         std::to_string(row % rows) + " key " + std::to_string(key);
}

// One row's comparison, group by group.
class RowJudge {
 public:
  RowJudge(const CaseData& data, const cpu::Reference& oracle, const cpu::Selection& probed,
           SelectionJudgement& judgement)
      : data_(data), oracle_(oracle), probed_(probed), judgement_(judgement) {
    const core::Geometry geometry = core::geometry_of(data.host_problem());
    const Problem& problem = data.device_problem();
    to_key_units_ = (problem.q.dtype == DType::f32 ? 1.0 : core::selection_scale(geometry.scale)) / geometry.scale;
    dot_error_ = sum_error(geometry.d, product_unit(problem));
  }

  void judge(std::int64_t row, std::int64_t keys) {
    const Problem& problem = data_.host_problem();
    double largest = -kInfinity, magnitude = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      if (!oracle_.selection.at(row, j)) continue;
      largest = std::max(largest, oracle_.scores.at(row, j));
      magnitude = std::max(magnitude, oracle_.magnitudes.at(row, j));
    }
    visible_score_ = largest + std::log(smallest_visible_weight(problem.q.dtype));
    // Scores so large that rounding moves them by more than that: which of them has the weight is left open.
    if (!data_.drawn().exact()) visible_score_ += 2 * dot_error_ * magnitude;
    // A 16-bit kernel may take exponentials of scores in fp16: each of the two off by half a unit in the last place.
    if (problem.q.dtype != DType::f32) visible_score_ += 2 * 0x1p-11 * std::abs(largest);
    std::map<std::int64_t, std::vector<std::int64_t>> groups;
    for (std::int64_t j = 0; j < keys; ++j) {
      const bool kernel_keeps = probed_.at(row, j) != 0;
      const double score = oracle_.scores.at(row, j);
      if (score == -kInfinity) {
        if (kernel_keeps) fail(row, j, "is masked, yet the kernel gives it weight");
        continue;
      }
      if (problem.pattern.is_dense()) {
        judgement_.selection.at(row, j) = kernel_keeps || !seen(row, j);
        if (!kernel_keeps && seen(row, j)) fail(row, j, "is dropped by the kernel under a dense pattern");
      } else {
        groups[place_of_key(j, problem.pattern.group, problem.grouping).group].push_back(j);
      }
    }
    for (const auto& [group, members] : groups) judge_group(row, members);
  }

 private:
  bool seen(std::int64_t row, std::int64_t j) const { return oracle_.scores.at(row, j) >= visible_score_; }

  // How far rounding may move the selection key of (row, j).
  double key_error(std::int64_t row, std::int64_t j) const {
    if (data_.drawn().exact()) return 0.0;
    const double arithmetic = dot_error_ * oracle_.magnitudes.at(row, j) * to_key_units_;
    if (data_.drawn().dtype == DType::f32) return arithmetic;
    // What is below that is taken for it.
    const double raised = lowest_fp16_on_gpu(data_) ? std::max(0.0, kLowestBiasedOnGpu - oracle_.keys.at(row, j)) : 0.0;
    // Rounding to fp16 turns the smallest arithmetic error into a whole step.
    const double magnitude = std::max(std::abs(oracle_.keys.at(row, j)), 0x1p-14);
    return arithmetic + raised + std::exp2(std::floor(std::log2(magnitude)) - 10);
  }

  void judge_group(std::int64_t row, const std::vector<std::int64_t>& members) {
    const std::int64_t keep = data_.host_problem().pattern.keep;
    double smallest_kept = kInfinity, largest_dropped = -kInfinity;  // by the oracle
    double smallest_kept_error = 0, largest_dropped_error = 0;
    std::int64_t kernel_count = 0, unseen = 0;
    bool differs = false;
    for (const std::int64_t j : members) {
      const double key = oracle_.keys.at(row, j);
      if (oracle_.selection.at(row, j) != 0) {
        if (key < smallest_kept) {
          smallest_kept = key;
          smallest_kept_error = key_error(row, j);
        }
      } else if (key > largest_dropped) {
        largest_dropped = key;
        largest_dropped_error = key_error(row, j);
      }
      kernel_count += probed_.at(row, j) != 0;
      unseen += !seen(row, j) && probed_.at(row, j) == 0;
    }
    std::int64_t taken = 0;
    for (const std::int64_t j : members) {
      const bool oracle_keeps = oracle_.selection.at(row, j) != 0;
      const bool kernel_keeps = probed_.at(row, j) != 0;
      // What is not seen is taken from the oracle, as far as the group has room.
      const bool takes = !kernel_keeps && oracle_keeps && !seen(row, j) && kernel_count + taken < keep;
      taken += takes;
      judgement_.selection.at(row, j) = kernel_keeps || takes;
      if (oracle_keeps == kernel_keeps || (oracle_keeps && !seen(row, j))) continue;
      differs = true;
      const double rival = oracle_keeps ? largest_dropped : smallest_kept;
      const double rival_error = oracle_keeps ? largest_dropped_error : smallest_kept_error;
      const double gap = std::abs(oracle_.keys.at(row, j) - rival);
      const double allowed = key_error(row, j) + rival_error;
      if (data_.drawn().exact() || gap > allowed) {
        fail(row, j,
             std::string("is ") + (kernel_keeps ? "kept" : "dropped") + " by the kernel and not by the oracle; gap " +
                 number(gap, 9) + ", rounding explains " + number(allowed, 9));
      }
    }
    const std::int64_t expected = std::min<std::int64_t>(keep, static_cast<std::int64_t>(members.size()));
    if (kernel_count > expected || kernel_count + unseen < expected) {
      fail(row, members.front(),
           "is in a group of which the kernel keeps " + std::to_string(kernel_count) + " keys, expected " +
               std::to_string(expected));
    }
    judgement_.near_ties += differs;
  }

  void fail(std::int64_t row, std::int64_t key, const std::string& what) {
    constexpr std::size_t kEnough = 4;  // a broken kernel differs everywhere
    if (judgement_.failures.size() < kEnough) {
      judgement_.failures.push_back("selection: " + place(data_, row, key) + " " + what);
    }
  }

  const CaseData& data_;
  const cpu::Reference& oracle_;
  const cpu::Selection& probed_;
  SelectionJudgement& judgement_;
  double to_key_units_ = 1;  // scaled scores to the units of selection keys
  double dot_error_ = 0;
  double visible_score_ = 0;
};

// The rows of the heads that share a key head, at one position: they must keep the same keys.
class SharedJudge {
 public:
  // `scores` are those that are compared: without a soft cap.
  SharedJudge(const CaseData& data, const cpu::Reference& oracle, const cpu::RowMatrix<double>& scores,
              const cpu::Selection& probed, SelectionJudgement& judgement)
      : data_(data), oracle_(oracle), scores_(scores), probed_(probed), judgement_(judgement) {
    const Problem& problem = data.device_problem();
    dot_error_ = sum_error(core::geometry_of(data.host_problem()).d, product_unit(problem));
    least_ = smallest_visible_weight(problem.q.dtype);
  }

  void judge(const std::vector<std::int64_t>& rows, std::int64_t keys) {
    rows_.clear();
    for (const std::int64_t row : rows) {
      if (!std::isnan(oracle_.lse[static_cast<std::size_t>(row)])) rows_.push_back(weights_of(row, keys));
    }
    const Pattern pattern = data_.host_problem().pattern;
    std::map<std::int64_t, std::vector<std::int64_t>> groups;
    for (std::int64_t j = 0; j < keys; ++j) {
      const bool visible = std::any_of(rows_.begin(), rows_.end(), [&](const Weights& w) { return sees(w.row, j); });
      for (const Weights& w : rows_) {
        if (!sees(w.row, j) && probed_.at(w.row, j) != 0) fail(w.row, j, "is masked, yet the kernel gives it weight");
      }
      const std::int64_t group = pattern.is_dense() ? j : place_of_key(j, pattern.group, grouping()).group;
      if (visible) groups[group].push_back(j);
    }
    for (const auto& [group, members] : groups) judge_group(members);
  }

 private:
  // One head's weights before pruning, and how far rounding may move them.
  struct Weights {
    std::int64_t row = 0;
    std::vector<double> weight, error;
    double visible_score = -kInfinity;  // a kept key with as much has a weight that shows, beside the others kept
  };

  Grouping grouping() const { return data_.host_problem().grouping; }
  bool sees(std::int64_t row, std::int64_t j) const { return scores_.at(row, j) != -kInfinity; }

  Weights weights_of(std::int64_t row, std::int64_t keys) const {
    double largest = -kInfinity, sum = 0, common = 0;
    for (std::int64_t j = 0; j < keys; ++j) largest = std::max(largest, scores_.at(row, j));
    Weights weights;
    weights.row = row;
    weights.weight.assign(static_cast<std::size_t>(keys), 0.0);
    weights.error = weights.weight;
    for (std::int64_t j = 0; j < keys; ++j) {
      if (!sees(row, j)) continue;
      const double score = scores_.at(row, j);
      const auto at = static_cast<std::size_t>(j);
      weights.weight[at] = std::exp(score - largest);
      // Of the score; a 16-bit kernel may take fp16's exponential of a score in fp16.
      double error = dot_error_ * oracle_.magnitudes.at(row, j) + 8 * kUnitF32 * (1 + std::abs(score));
      if (data_.drawn().dtype != DType::f32) error += 0x1p-9 * (1 + std::abs(score));
      weights.error[at] = error;
      sum += weights.weight[at];
      common += weights.weight[at] * error;
    }
    for (std::size_t j = 0; j < weights.weight.size(); ++j) {
      weights.weight[j] /= sum > 0 ? sum : 1;
      // Relative errors past 1 let a weight be anything, up to all of the row's.
      const double relative = weights.error[j] + common / (sum > 0 ? sum : 1);
      weights.error[j] = relative > 0.5 ? 1.0 : weights.weight[j] * std::expm1(relative) + least_;
    }
    double most = -kInfinity, magnitude = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      if (!sees(row, j) || probed_.at(row, j) == 0) continue;
      most = std::max(most, oracle_.scores.at(row, j));
      magnitude = std::max(magnitude, oracle_.magnitudes.at(row, j));
    }
    weights.visible_score = most + std::log(least_) + 2 * dot_error_ * magnitude;
    if (data_.drawn().dtype != DType::f32) weights.visible_score += 2 * 0x1p-11 * std::abs(most);
    return weights;
  }

  // Whether a key would have a weight in the kernel's output, were it kept.
  bool shows(const Weights& w, std::int64_t j) const {
    return sees(w.row, j) && oracle_.scores.at(w.row, j) >= w.visible_score;
  }
  double key_error(std::int64_t j) const {
    double error = 0;
    for (const Weights& w : rows_) {
      if (sees(w.row, j)) error += w.error[static_cast<std::size_t>(j)];
    }
    return error;
  }
  double key(std::int64_t j) const {
    double sum = 0;
    for (const Weights& w : rows_) sum += w.weight[static_cast<std::size_t>(j)];
    return sum;
  }
  bool oracle_keeps(std::int64_t j) const {
    return std::any_of(rows_.begin(), rows_.end(),
                       [&](const Weights& w) { return oracle_.selection.at(w.row, j) != 0; });
  }
  bool kernel_keeps(std::int64_t j) const {
    return std::any_of(rows_.begin(), rows_.end(),
                       [&](const Weights& w) { return sees(w.row, j) && probed_.at(w.row, j) != 0; });
  }

  void judge_group(const std::vector<std::int64_t>& members) {
    const std::int64_t keep = data_.host_problem().pattern.is_dense() ? 1 : data_.host_problem().pattern.keep;
    double smallest_kept = kInfinity, largest_dropped = -kInfinity;  // by the oracle
    double smallest_kept_error = 0, largest_dropped_error = 0;
    for (const std::int64_t j : members) {
      if (oracle_keeps(j) && key(j) < smallest_kept) {
        smallest_kept = key(j);
        smallest_kept_error = key_error(j);
      } else if (!oracle_keeps(j) && key(j) > largest_dropped) {
        largest_dropped = key(j);
        largest_dropped_error = key_error(j);
      }
    }
    const std::int64_t count = std::count_if(members.begin(), members.end(), [&](auto j) { return kernel_keeps(j); });
    std::int64_t unseen = 0, taken = 0;
    bool differs = false;
    for (const std::int64_t j : members) {
      const bool shown = std::any_of(rows_.begin(), rows_.end(), [&](const Weights& w) { return shows(w, j); });
      // What does not show is taken from the oracle, as far as the group has room.
      const bool kept = kernel_keeps(j) || (oracle_keeps(j) && !shown && count + taken < keep);
      taken += kept && !kernel_keeps(j);
      unseen += !shown && !kernel_keeps(j);
      for (const Weights& w : rows_) {
        judgement_.selection.at(w.row, j) = kept && sees(w.row, j);
        if (kernel_keeps(j) && shows(w, j) && probed_.at(w.row, j) == 0) {
          fail(w.row, j, "is dropped in this head and kept in another that shares the choice");
        }
      }
      if (kept == oracle_keeps(j)) continue;
      differs = true;
      const double gap = std::abs(key(j) - (kept ? smallest_kept : largest_dropped));
      const double allowed = key_error(j) + (kept ? smallest_kept_error : largest_dropped_error);
      if (gap > allowed) {
        fail(rows_.front().row, j,
             std::string("is ") + (kept ? "kept" : "dropped") + " by the kernel and not by the oracle; gap " +
                 number(gap, 9) + ", rounding explains " + number(allowed, 9));
      }
    }
    const std::int64_t expected = std::min<std::int64_t>(keep, static_cast<std::int64_t>(members.size()));
    if (count > expected || count + unseen < expected) {
      fail(rows_.front().row, members.front(),
           "is in a group of which the kernel keeps " + std::to_string(count) + " keys, expected " +
               std::to_string(expected));
    }
    judgement_.near_ties += differs;
  }

  void fail(std::int64_t row, std::int64_t key, const std::string& what) {
    constexpr std::size_t kEnough = 4;  // a broken kernel differs everywhere
    if (judgement_.failures.size() < kEnough) {
      judgement_.failures.push_back("shared selection: " + place(data_, row, key) + " " + what);
    }
  }

  const CaseData& data_;
  const cpu::Reference& oracle_;
  const cpu::RowMatrix<double>& scores_;
  const cpu::Selection& probed_;
  SelectionJudgement& judgement_;
  std::vector<Weights> rows_;  // of the heads that have weights
  double dot_error_ = 0;
  double least_ = 0;  // weights up to this may vanish
};

}  // namespace

cpu::Selection probe_selection(const CaseData& data, const Runner& runner, std::int64_t width,
                               std::int64_t key_columns) {
  const Problem& host = data.host_problem();
  const std::int64_t heads = host.q.extent(1);
  const std::int64_t rows_q = host.q.extent(2);
  cpu::Selection probed(host.q.extent(0) * heads * rows_q, key_columns, 0);
  const std::vector<cpu::Sequence> sequences = cpu::sequences_of(host);
  // fp16 has few small numbers: a larger unit keeps small weights above zero.
  const double unit = host.q.dtype == DType::f16 ? 0x1p15 : 1.0;

  ConstTensorView v_view =
      laid_out(host.v.dtype, {host.v.extent(0), host.v.extent(1), host.v.extent(2), width}, data.drawn().v_layout);
  // Where the tensor itself lies: a kernel may serve one place in memory by another path.
  Tensor v(data.memory(), v_view, offset_of(data.drawn().v_layout));
  v.fill([](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return 0.0; });
  Tensor out = data.output_like_q(width);
  const auto set_units = [&](std::int64_t base, double value) {
    for (const cpu::Sequence& seq : sequences) {
      for (std::int64_t j = base; j < std::min(seq.n_k, base + width); ++j) {
        for (std::int64_t h = 0; h < host.v.extent(1); ++h) v.set(value, seq.batch, h, seq.k_begin + j, j - base);
      }
    }
  };
  for (std::int64_t base = 0; base < key_columns; base += width) {
    if (base > 0) set_units(base - width, 0.0);
    set_units(base, unit);
    const bool pages = data.drawn().page > 0;
    Tensor given = pages ? data.paged(v, data.drawn().v_layout) : Tensor();
    (pages ? given : v).upload();
    ForwardArgs args;
    args.problem = data.device_problem();
    args.problem.rest = Rest::drop;
    args.problem.value_sums = {};
    args.problem.v = (pages ? given : v).device_view();
    // Neither takes part in the choice; a key whose weight is dropped, or is nothing beside a sink, would look pruned.
    args.problem.dropout = {};
    args.problem.sinks = {};
    args.out = out.device_view();
    runner.forward(args);
    out.download();
    for (const cpu::Sequence& seq : sequences) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = seq.q_begin; i < seq.q_begin + seq.n_q; ++i) {
          for (std::int64_t j = base; j < std::min(seq.n_k, base + width); ++j) {
            probed.at((seq.batch * heads + h) * rows_q + i, j) = out.at(seq.batch, h, i, j - base) != 0.0;
          }
        }
      }
    }
  }
  return probed;
}

SelectionJudgement judge_selection(const CaseData& data, const cpu::Reference& oracle, const cpu::Selection& probed) {
  SelectionJudgement judgement;
  judgement.selection = cpu::Selection(static_cast<std::int64_t>(oracle.lse.size()), oracle.selection.columns, 0);
  RowJudge judge(data, oracle, probed, judgement);
  const Problem& host = data.host_problem();
  Problem uncapped = host;
  uncapped.soft_cap.reset();
  const bool other_scores = host.choice == Choice::shared && host.soft_cap;
  const cpu::RowMatrix<double> scores =
      other_scores ? cpu::reference_forward(uncapped, &oracle.selection).scores : oracle.scores;
  SharedJudge together(data, oracle, scores, probed, judgement);
  const std::int64_t group = host.k.extent(1) > 0 ? host.q.extent(1) / host.k.extent(1) : 1;
  for (const cpu::Sequence& seq : cpu::sequences_of(host)) {
    for (std::int64_t h = 0; host.choice == Choice::shared && h < host.q.extent(1); h += group) {
      for (std::int64_t i = 0; i < seq.n_q; ++i) {
        std::vector<std::int64_t> rows;
        for (std::int64_t other = h; other < h + group; ++other) {
          rows.push_back((seq.batch * host.q.extent(1) + other) * host.q.extent(2) + seq.q_begin + i);
        }
        together.judge(rows, seq.n_k);
      }
    }
    if (host.choice == Choice::shared) continue;
    for (std::int64_t h = 0; h < host.q.extent(1); ++h) {
      for (std::int64_t i = 0; i < seq.n_q; ++i) {
        const std::int64_t row = (seq.batch * host.q.extent(1) + h) * host.q.extent(2) + seq.q_begin + i;
        if (!std::isnan(oracle.lse[static_cast<std::size_t>(row)])) judge.judge(row, seq.n_k);
      }
    }
  }
  return judgement;
}

}  // namespace dspattn::check
