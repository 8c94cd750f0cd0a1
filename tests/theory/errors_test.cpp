// Parameters outside their range raise, naming the parameter, what was expected and what was given.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "dspattn/error.h"
#include "dspattn/theory.h"
#include "dspattn/theory_monte_carlo.h"

namespace dspattn::theory {
namespace {

struct Case {
  std::function<void()> call;
  std::vector<std::string> says;
};

TEST(Errors, NameParameterExpectationAndValue) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> correlation = {1.0, 0.5};
  const std::vector<double> rising = {1.0, 0.9, -0.9};
  const std::vector<Case> cases = {
      {[] { topk_quality(0.0, 1, 1); }, {"topk_quality", "density", "(0, 1]", "got 0"}},
      {[] { topk_quality(1.5, 1, 1); }, {"density", "got 1.5"}},
      {[] { fixed_quality(-0.1); }, {"fixed_quality", "density", "got -0.1"}},
      {[] { one_of_two_quality(0, 1); }, {"p must be finite and > 0", "got 0"}},
      {[] { one_of_two_quality(-2, -1); }, {"p must be", "got -2", "sigma must be", "got -1"}},
      {[nan] {
         nm_quality({2, 4}, nan, 1);
       },
       {"p must be", "got nan"}},
      {[] {
         nm_quality({5, 4}, 1, 1);
       },
       {"pattern.keep", "5 of 4"}},
      {[] {
         nm_quality({1, 33}, 1, 1);
       },
       {"pattern.group", "32", "got 33"}},
      {[] {
         nm_quality_finite({2, 4}, 1, 1, 6);
       },
       {"keys", "multiple of pattern.group = 4", "got 6"}},
      {[] { topk_quality_finite(9, 1, 1, 8); }, {"kept_keys", "keys = 8", "got 9"}},
      {[] { one_of_two_quality_correlated(1, 1, 1.5); }, {"rho", "[-1, 1]", "got 1.5"}},
      {[] {
         nm_quality_equicorrelated({2, 4}, 1, 1, -0.5);
       },
       {"rho", "-0.333333", "got -0.5"}},
      {[&] {
         mean_group_correlation({2, 4}, Grouping::consecutive, correlation);
       },
       {"autocorrelation", "lags 0 to 3", "2 values"}},
      {[&] {
         mean_group_correlation({1, 3}, Grouping::interleaved, correlation);
       },
       {"divisor of 128", "got 3"}},
      {[] {
         spread_where_topk_overtakes({1, 2}, 0.6);
       },
       {"density", "0.5", "got 0.6"}},
      {[] {
         full_traffic({1024, 64, 0});
       },
       {"full_traffic", "tile must be >= 1", "got 0"}},
      {[] {
         full_traffic({0, 0, 128});
       },
       {"keys", "head_dim"}},
      {[] { topk_speedup_bound(64, 0, 0.1); }, {"tile", "got 0"}},
      {[] {
         nm_speedup({3, 2}, 64, 128);
       },
       {"pattern.keep", "3 of 2"}},
      {[] {
         nm_traffic({1024, 64, 128}, {2, 4}, 0);
       },
       {"element_bits", "got 0"}},
      {[] {
         performer_mse_independent({10, 4, 4, 16}, 8);
       },
       {"dot", "4", "got 10"}},
      {[] {
         performer_mse_orthogonal({1, 4, 4, 16}, 0);
       },
       {"features", "got 0"}},
      {[] { performer_relative_mse(32, 100); }, {"head_dim", "> 36", "got 32"}},
      {[] {
         performer_traffic({1024, 64, 128}, -1);
       },
       {"features", "got -1"}},
      {[] {
         nystrom_traffic({.landmarks = 0}, {2, 4});
       },
       {"landmarks", "got 0"}},
      {[] {
         linformer_traffic({.projected = 0}, {2, 4});
       },
       {"projected", "got 0"}},
      {[] {
         block_sparse_traffic({}, 2.0, {2, 4});
       },
       {"density", "got 2"}},
      {[] { quality({}, {}, 4, 1.0); }, {"weights", "got 0"}},
      {[] { simulate_quality(Selection::topk(0), {}, Average::ratio, 10, 1); }, {"density", "got 0"}},
      {[] {
         simulate_quality(Selection::nm({1, 3}, Grouping::interleaved), {}, Average::ratio, 10, 1);
       },
       {"divisor of 128"}},
      {[&] {
         simulate_quality(Selection::nm({1, 2}), {.keys = 8, .autocorrelation = rising}, Average::ratio, 10, 1);
       },
       {"autocorrelation", "positive definite"}},
  };
  for (const Case& one : cases) {
    try {
      one.call();
      ADD_FAILURE() << "no error where one was due: " << one.says.front();
    } catch (const Error& error) {
      for (const std::string& part : one.says) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " not in: " << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::theory
