// Progress on standard error: a bar that redraws itself on a terminal, a line per tenth elsewhere.
#pragma once

#include <cstdint>
#include <string>

namespace dspattn::apps {

class Progress {
 public:
  Progress(std::string what, std::int64_t total);
  // `note` follows the count, e.g. "2 failed".
  void show(std::int64_t done, const std::string& note = {});
  // Takes the bar off the terminal, so that other output can follow.
  void clear();

 private:
  std::string what_;
  std::int64_t total_;
  std::int64_t shown_tenths_ = 0;
  bool terminal_;
};

}  // namespace dspattn::apps
