// Running mean of a sample and of a ratio of two, with standard errors.
#pragma once

#include <cmath>
#include <cstdint>

#include "dspattn/theory_monte_carlo.h"

namespace dspattn::theory {

// Welford's update: stable for any number of samples.
class SampleMean {
 public:
  void add(double value) {
    ++count_;
    const double delta = value - mean_;
    mean_ += delta / static_cast<double>(count_);
    squares_ += delta * (value - mean_);
  }
  Estimate estimate() const {
    const auto n = static_cast<double>(count_);
    return {.mean = mean_, .standard_error = std::sqrt(squares_ / (n - 1.0) / n), .samples = count_};
  }

 private:
  std::int64_t count_ = 0;
  double mean_ = 0.0;
  double squares_ = 0.0;
};

// mean(x)/mean(y); the delta method: the error of the ratio r is that of the mean of (x - r y)/mean(y).
class SampleRatio {
 public:
  void add(double x, double y) {
    ++count_;
    const auto n = static_cast<double>(count_);
    const double dx = x - mean_x_;
    const double dy = y - mean_y_;
    mean_x_ += dx / n;
    mean_y_ += dy / n;
    xx_ += dx * (x - mean_x_);
    yy_ += dy * (y - mean_y_);
    xy_ += dx * (y - mean_y_);
  }
  Estimate estimate() const {
    const auto n = static_cast<double>(count_);
    const double ratio = mean_x_ / mean_y_;
    const double variance = (xx_ - 2.0 * ratio * xy_ + ratio * ratio * yy_) / (n - 1.0);
    return {.mean = ratio, .standard_error = std::sqrt(std::fmax(variance, 0.0) / n) / mean_y_, .samples = count_};
  }

 private:
  std::int64_t count_ = 0;
  double mean_x_ = 0.0, mean_y_ = 0.0, xx_ = 0.0, yy_ = 0.0, xy_ = 0.0;
};

}  // namespace dspattn::theory
