#include "apps/progress.h"

#include <unistd.h>

#include <iostream>
#include <utility>

namespace dspattn::apps {

Progress::Progress(std::string what, std::int64_t total)
    : what_(std::move(what)), total_(total), terminal_(isatty(STDERR_FILENO) != 0) {}

void Progress::show(std::int64_t done, const std::string& note) {
  if (total_ <= 0) return;
  const std::string count = std::to_string(done) + "/" + std::to_string(total_) + (note.empty() ? "" : ", " + note);
  if (terminal_) {
    constexpr std::int64_t kWidth = 30;
    const auto filled = static_cast<std::size_t>(kWidth * done / total_);
    std::cerr << "\r" << what_ << " [" << std::string(filled, '#') << std::string(kWidth - filled, ' ') << "] " << count
              << "\x1b[K" << std::flush;
  } else if (const std::int64_t tenths = 10 * done / total_; tenths > shown_tenths_) {
    shown_tenths_ = tenths;
    std::cerr << what_ << " " << count << "\n";
  }
}

void Progress::clear() {
  if (terminal_) std::cerr << "\r\x1b[K" << std::flush;
}

}  // namespace dspattn::apps
