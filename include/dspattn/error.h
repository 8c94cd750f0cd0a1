// The one exception type of the library, and its no-throw counterpart.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace dspattn {

// Every reason is a sentence that names the argument, what was expected and what was given. All reasons are collected
// before the error is raised; nothing has been allocated, launched or written by then.
class Error : public std::runtime_error {
 public:
  explicit Error(std::vector<std::string> reasons);
  explicit Error(const std::string& reason) : Error(std::vector<std::string>{reason}) {}

  const std::vector<std::string>& reasons() const noexcept { return reasons_; }

 private:
  std::vector<std::string> reasons_;
};

// What try_forward and try_backward return: no reasons means success.
struct Status {
  std::vector<std::string> reasons;

  bool ok() const noexcept { return reasons.empty(); }
  std::string message() const;
};

}  // namespace dspattn
