// dspattn run: attention of arrays in .npy files.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/commands.h"
#include "apps/device_tensor.h"
#include "apps/npy.h"
#include "apps/output_file.h"
#include "apps/parser.h"
#include "apps/problem_options.h"
#include "dspattn/attention.h"
#include "dspattn/kernels.h"
#include "dspattn/workspace.h"

namespace dspattn::apps {
namespace {

struct RunOptions {
  RuleOptions rule;
  std::string q, k, v, out, lse;
  std::string allowed, bias, key_lengths, cu_q, cu_k;
  std::string dtype;
  std::string layout = "bhnd";
  std::string device = "cpu";
  std::string kernel;
  int threads = 0;
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

// Leading extents of 1, up to four.
std::vector<std::int64_t> with_four_extents(std::vector<std::int64_t> shape) {
  shape.insert(shape.begin(), 4 - shape.size(), 1);
  return shape;
}

DeviceTensor upload(const NpyArray& array, Device device, const std::vector<std::int64_t>& shape) {
  DeviceTensor tensor(device, array.dtype, shape);
  tensor.upload(array.bytes.data());
  return tensor;
}

// The array of a file that was given as this argument, which the errors name first.
NpyArray read_array(const std::string& argument, const std::string& file, NpyUse use = NpyUse::numbers) {
  try {
    return read_npy(file, use);
  } catch (const Error& error) {
    std::vector<std::string> reasons;
    for (const std::string& reason : error.reasons()) reasons.push_back(argument + ": " + reason);
    throw Error(std::move(reasons));
  }
}

// "3,5,7", or a .npy file of integers.
NpyArray read_integers(const std::string& text, const std::string& option) {
  if (text.ends_with(".npy")) {
    NpyArray array = read_array(option, text);
    if (array.dtype != DType::i32 || array.shape.size() != 1) {
      throw Error(option + ": " + text + ": expected integers of one dimension, got " + std::string(name(array.dtype)) +
                  " of shape " + shape_text(array.shape));
    }
    return array;
  }
  std::vector<std::int32_t> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::int32_t value = 0;
    const auto [stop, code] = std::from_chars(text.data() + begin, text.data() + end, value);
    if (code != std::errc{} || stop != text.data() + end) {
      throw Error(option + ": expected integers with commas between, or a .npy file, got \"" + text + "\"");
    }
    values.push_back(value);
    begin = end + 1;
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  return {DType::i32, {std::ssize(values)}, {bytes, bytes + 4 * values.size()}};
}

// The view of a [batch, n, heads, d] array as [batch, heads, n, d].
TensorView with_heads_first(const TensorView& view) {
  TensorView turned = view;
  std::swap(turned.shape[1], turned.shape[2]);
  std::swap(turned.stride[1], turned.stride[2]);
  return turned;
}

std::int32_t longest(const NpyArray& cumulative) {
  std::int32_t most = 0;
  const auto* values = reinterpret_cast<const std::int32_t*>(cumulative.bytes.data());
  for (std::size_t i = 1; i < cumulative.bytes.size() / 4; ++i) {
    // Wrapping, as a decreasing list is refused by validation and not here.
    const auto length =
        static_cast<std::int32_t>(static_cast<std::uint32_t>(values[i]) - static_cast<std::uint32_t>(values[i - 1]));
    most = std::max(most, length);
  }
  return most;
}

// Whether both name one file, also by way of links.
bool same_place(const std::string& first, const std::string& second) {
  if (first == "-" || second == "-") return first == second;
  const auto place = [](const std::string& name) {
    std::error_code problem;
    const std::filesystem::path whole = std::filesystem::absolute(name);
    const std::filesystem::path real = std::filesystem::weakly_canonical(whole, problem);
    return problem ? whole.lexically_normal() : real;  // where links cannot be followed
  };
  return place(first) == place(second);
}

// All arrays of one call on the device, and the call.
class Call {
 public:
  explicit Call(const RunOptions& options) : options_(options), device_(parse_device(options.device)) {
    if (options.layout != "bhnd" && options.layout != "bnhd") {
      throw Error("layout: expected bhnd or bnhd, got \"" + options.layout + "\"");
    }
    if (!options.lse.empty() && same_place(options.lse, options.out)) {
      throw Error("lse: expected another place than --out, got \"" + options.lse + "\"");
    }
    files_.emplace_back("--out", options.out);
    if (!options.lse.empty()) files_.emplace_back("--lse", options.lse);
    if (!options.dtype.empty()) wanted_ = parse_dtype(options.dtype);
    options.rule.apply(args_.problem);
    args_.problem.device = device_;
    args_.run.kernel = options.kernel;
    args_.run.threads = options.threads;
    args_.problem.q = input(options.q, "q", q_, q_shape_);
    std::vector<std::int64_t> k_shape;
    std::vector<std::int64_t> v_shape;
    args_.problem.k = input(options.k, "k", k_, k_shape);
    args_.problem.v = input(options.v, "v", v_, v_shape);
    if (k_shape.size() != q_shape_.size() || v_shape.size() != q_shape_.size()) {
      throw Error("q, k, v: expected the same number of dimensions, got shapes " + shape_text(q_shape_) + ", " +
                  shape_text(k_shape) + " and " + shape_text(v_shape));
    }
    if (!options.allowed.empty()) add_mask();
    if (!options.bias.empty()) add_bias();
    if (!options.key_lengths.empty()) {
      args_.problem.mask.key_lengths = integers(read_integers(options.key_lengths, "--key-lengths"), lengths_);
    }
    add_packed();
  }

  void run() {
    std::vector<std::int64_t> out_shape = q_shape_;
    out_shape.back() = args_.problem.v.extent(3);
    out_ = DeviceTensor(device_, args_.problem.q.dtype, with_four_extents(out_shape));
    args_.out = options_.layout == "bnhd" ? with_heads_first(out_.view()) : out_.view();
    const ConstTensorView& q = args_.problem.q;
    std::vector<std::int64_t> lse_shape{q.extent(0), q.extent(1), q.extent(2)};
    if (!options_.lse.empty()) {
      lse_ = DeviceTensor(device_, DType::f32, lse_shape);
      args_.lse = lse_.view();
    }
    Workspace workspace;
    workspace.attach(args_);
    forward(args_);

    std::vector<NpyArray> results{downloaded(out_, args_.out.dtype, out_shape)};
    if (!options_.lse.empty()) {
      // As many leading dimensions as q had.
      lse_shape.erase(lse_shape.begin(), lse_shape.begin() + (4 - std::ssize(q_shape_)));
      results.push_back(downloaded(lse_, DType::f32, lse_shape));
    }
    // All files or none: each is written in full before the first takes its place.
    for (std::size_t i = 0; i < results.size(); ++i) {
      files_[i].write([&](std::ostream& stream) { write_npy(stream, results[i]); });
    }
    for (OutputFile& file : files_) file.take_place();
    const KernelInfo kernel = choose(args_.problem, Pass::forward, options_.kernel);
    const bool taken = std::ranges::any_of(files_, [](const OutputFile& file) { return file.is_standard_output(); });
    (taken ? std::cerr : std::cout) << options_.out << ": " << shape_text(out_shape) << " " << name(args_.out.dtype)
                                    << ", pattern " << to_string(args_.problem.pattern) << ", "
                                    << to_string(args_.problem.grouping)
                                    << (args_.problem.rest == Rest::mean ? ", rest mean" : "") << ", kernel "
                                    << kernel.name << "\n";
  }

 private:
  NpyUse numbers() const { return wanted_ == DType::bf16 ? NpyUse::bf16_bits : NpyUse::numbers; }

  ConstTensorView input(const std::string& file, const std::string& argument, DeviceTensor& tensor,
                        std::vector<std::int64_t>& shape) {
    const NpyArray array = read_array(argument, file, numbers());
    if (!is_floating(array.dtype)) {
      throw Error(argument + ": " + file + ": expected float32, float16 or bfloat16, got " +
                  std::string(name(array.dtype)));
    }
    if (wanted_ && array.dtype != *wanted_) {
      throw Error(argument + ": " + file + ": expected " + std::string(name(*wanted_)) + " as --dtype says, got " +
                  std::string(name(array.dtype)));
    }
    const std::size_t least = options_.layout == "bnhd" ? 3 : 2;
    if (array.shape.size() < least) {
      throw Error(argument + ": " + file + ": expected " + (least == 3 ? "[n, heads, d]" : "[n, d]") +
                  " or more dimensions, got shape " + shape_text(array.shape));
    }
    shape = array.shape;
    tensor = upload(array, device_, with_four_extents(shape));
    return options_.layout == "bnhd" ? with_heads_first(tensor.view()) : tensor.view();
  }

  void add_mask() {
    const NpyArray array = read_array("--mask", options_.allowed, NpyUse::mask);
    if (array.dtype != DType::b8) {
      throw Error("--mask: " + options_.allowed + ": expected bool or integers, got " + std::string(name(array.dtype)) +
                  "; --bias takes numbers to add to the scores");
    }
    allowed_ = upload(array, device_, with_four_extents(array.shape));
    args_.problem.mask.allowed = allowed_.view();
  }

  void add_bias() {
    const NpyArray array = read_array("--bias", options_.bias, numbers());
    bias_ = upload(array, device_, with_four_extents(array.shape));
    args_.problem.mask.bias = bias_.view();
  }

  ConstTensorView integers(const NpyArray& array, DeviceTensor& tensor) {
    tensor = upload(array, device_, array.shape);
    return tensor.view();
  }

  void add_packed() {
    if (options_.cu_q.empty() && options_.cu_k.empty()) return;
    const NpyArray of_q = read_integers(options_.cu_q.empty() ? options_.cu_k : options_.cu_q, "--cu-q");
    const NpyArray of_k = read_integers(options_.cu_k.empty() ? options_.cu_q : options_.cu_k, "--cu-k");
    Packed packed;
    packed.cu_q = integers(of_q, cu_q_);
    packed.cu_k = integers(of_k, cu_k_);
    packed.max_q = longest(of_q);
    packed.max_k = longest(of_k);
    args_.problem.packed = packed;
  }

  static NpyArray downloaded(const DeviceTensor& tensor, DType dtype, const std::vector<std::int64_t>& shape) {
    NpyArray array{dtype, shape, std::vector<std::byte>(tensor.bytes())};
    tensor.download(array.bytes.data());
    return array;
  }

  const RunOptions& options_;
  Device device_;
  std::optional<DType> wanted_;
  std::vector<OutputFile> files_;  // --out and, where given, --lse
  std::vector<std::int64_t> q_shape_;
  DeviceTensor q_, k_, v_, out_, lse_, allowed_, bias_, lengths_, cu_q_, cu_k_;
  ForwardArgs args_;
};

}  // namespace

void register_run(Parser& parser, Outcome&) {
  Command command =
      parser.add_subcommand("run", "Attention of your own arrays: q, k, v from .npy files, the result to one");
  auto options = std::make_shared<RunOptions>();
  command.add_option("q", options->q, "queries [batch, heads, n_q, d]; leading dimensions may be left out")
      .required()
      .type_name("FILE");
  command.add_option("k", options->k, "keys [batch, kv_heads, n_k, d]").required().type_name("FILE");
  command.add_option("v", options->v, "values [batch, kv_heads, n_k, d_v]").required().type_name("FILE");
  command.add_option("--out", options->out, "where the result goes; - for standard output")
      .required()
      .type_name("FILE");
  command
      .add_option("--lse", options->lse,
                  "where the log-sum-exp of each row's kept scores (with --rest mean: of all) goes")
      .type_name("FILE");
  options->rule.add_to(command);
  command
      .add_option("--mask", options->allowed,
                  "array of bool or integers, False or 0 hides a key; extents of 1 broadcast")
      .type_name("FILE");
  command.add_option("--bias", options->bias, "array added to the scaled scores; extents of 1 broadcast")
      .type_name("FILE");
  command.add_option("--key-lengths", options->key_lengths, "keys that count in each sequence: 7,5,9 or a .npy file")
      .type_name("LIST");
  command.add_option("--cu-q", options->cu_q, "packed batch: where each sequence starts, and the end: 0,7,12")
      .type_name("LIST");
  command.add_option("--cu-k", options->cu_k, "the same for the keys (default: as --cu-q)").type_name("LIST");
  command.add_option("--layout", options->layout, "order of dimensions in the files: bhnd or bnhd")
      .type_name("NAME")
      .capture_default_str();
  command
      .add_option("--dtype", options->dtype,
                  "insist on fp32, fp16 or bf16; bf16 also takes 16-bit unsigned integers as bfloat16 bits")
      .type_name("TYPE");
  command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").type_name("NAME").capture_default_str();
  command.add_option("--kernel", options->kernel, "force a kernel of the table by name").type_name("NAME");
  command.add_option("--threads", options->threads, "CPU threads; 0: all").type_name("COUNT").capture_default_str();
  command.footer(R"(
Types: float32, float16, and bfloat16 as ml_dtypes saves it ("<V2"); float64 is refused.
Examples:
  dspattn run q.npy k.npy v.npy --out o.npy --pattern 2:4 --causal
  dspattn run q.npy k.npy v.npy --out o.npy --lse lse.npy --key-lengths 100,37
  dspattn run q.npy k.npy v.npy --out o.npy --pattern 1:2 --grouping consecutive --mask visible.npy)");
  command.callback([options] { Call(*options).run(); });
}

}  // namespace dspattn::apps
