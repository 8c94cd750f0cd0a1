#include "check/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "check/rounding.h"
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

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
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
      const bool oracle_keeps = oracle_.selection.at(row, j) != 0;
      const bool seen = score >= visible_score_;
      judgement_.selection.at(row, j) = kernel_keeps || (oracle_keeps && !seen);
      if (problem.pattern.is_dense()) {
        if (!kernel_keeps && seen) fail(row, j, "is dropped by the kernel under a dense pattern");
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
    // Rounding to fp16 turns the smallest arithmetic error into a whole step.
    const double magnitude = std::max(std::abs(oracle_.keys.at(row, j)), 0x1p-14);
    return arithmetic + std::exp2(std::floor(std::log2(magnitude)) - 10);
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
    for (const std::int64_t j : members) {
      const bool oracle_keeps = oracle_.selection.at(row, j) != 0;
      const bool kernel_keeps = probed_.at(row, j) != 0;
      if (oracle_keeps == kernel_keeps || (oracle_keeps && !seen(row, j))) continue;
      differs = true;
      const double rival = oracle_keeps ? largest_dropped : smallest_kept;
      const double rival_error = oracle_keeps ? largest_dropped_error : smallest_kept_error;
      const double gap = std::abs(oracle_.keys.at(row, j) - rival);
      const double allowed = key_error(row, j) + rival_error;
      if (data_.drawn().exact() || gap > allowed) {
        fail(row, j,
             std::string("is ") + (kernel_keeps ? "kept" : "dropped") + " by the kernel and not by the oracle; gap " +
                 number(gap) + ", rounding explains " + number(allowed));
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
    v.upload();
    ForwardArgs args;
    args.problem = data.device_problem();
    args.problem.rest = Rest::drop;
    args.problem.v = v.device_view();
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
  for (const cpu::Sequence& seq : cpu::sequences_of(host)) {
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
