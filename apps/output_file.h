// A file that a command writes its result to, named by an option. Whether it can be written is found out when it is
// named, before the work; the result itself is written in full beside its place and then takes it, so that what was
// there before is lost to no failure; its permissions stay. Until then it has no name, where the file system can do
// that (O_TMPFILE): a run that is killed leaves nothing. Elsewhere it leaves <file>.partial, which a later run passes
// by and tells of. "-" is standard output.
#pragma once

#include <filesystem>
#include <functional>
#include <ostream>
#include <string>

namespace dspattn::apps {

class OutputFile {
 public:
  // Throws Error that names the option when no file can be written there.
  OutputFile(std::string option, const std::string& path);
  ~OutputFile();  // removes what was written and did not take its place
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  bool is_standard_output() const { return name_ == "-"; }
  // Writes what `content` sends to the stream, beside its place. Throws std::runtime_error when that fails.
  void write(const std::function<void(std::ostream&)>& content);
  // The file takes its place. Several results are all written before the first of them takes its own.
  void take_place();

 private:
  bool make_beside();  // false: errno says why not
  bool make_nameless();
  bool make_named();
  void give_name();
  void keep_permissions();
  void discard();

  std::string option_;
  std::string name_;  // as the user gave it
  std::filesystem::path place_;
  bool replaces_ = false;         // false: the bytes go straight to their place, a device or a pipe
  bool told_ = false;             // of what stands beside the place
  int nameless_ = -1;             // a file in the place's folder that has no name yet
  std::filesystem::path beside_;  // what is written to: empty until it is made
};

}  // namespace dspattn::apps
