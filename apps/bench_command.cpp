// dspattn bench: times the library on shapes of the user's choice, as a table and as JSON.
#include <initializer_list>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "apps/bench_cell.h"
#include "apps/commands.h"
#include "apps/machine.h"
#include "apps/output_file.h"
#include "apps/parser.h"
#include "apps/problem_options.h"
#include "apps/progress.h"

namespace dspattn::apps {
namespace {

struct BenchOptions {
  std::vector<std::int64_t> n{256, 1024};
  std::vector<std::int64_t> d{64};
  std::vector<std::string> patterns;  // empty: 2:4 and 1:2, and dense on the CPU, where the library has that
  std::vector<std::string> groupings{"interleaved"};
  std::vector<std::string> rests{"drop"};
  std::vector<std::string> dtypes{"fp32"};
  std::vector<std::string> masks{"full"};
  std::vector<std::string> passes{"forward"};
  std::int64_t batch = 1;
  std::int64_t heads = 8;
  std::optional<std::int64_t> kv_heads;
  std::optional<std::int64_t> n_q;
  std::string device = "cpu";
  std::string json;
  CellOptions cell;
};

bool parse_mask(const std::string& text) {
  if (text != "full" && text != "causal") throw Error("mask: expected full or causal, got \"" + text + "\"");
  return text == "causal";
}

Pass parse_pass(const std::string& text) {
  if (text != "forward" && text != "backward") {
    throw Error("pass: expected forward or backward, got \"" + text + "\"");
  }
  return text == "forward" ? Pass::forward : Pass::backward;
}

void require_positive(const char* option, std::int64_t value) {
  if (value < 1) throw Error(std::string(option) + ": expected at least 1, got " + std::to_string(value));
}

// Of what no machine holds the number of bytes may overflow, so it is counted in floating point.
void require_room(const CellShape& cell) {
  const auto product = [](std::initializer_list<std::int64_t> factors) {
    double result = 1;
    for (const std::int64_t factor : factors) result *= static_cast<double>(factor);
    return result;
  };
  const double queries = product({cell.batch, cell.heads, cell.n_q});
  const double keys = product({cell.batch, cell.kv_heads, cell.n_k});
  const double elements = 2 * (queries + keys) * static_cast<double>(cell.d) * (cell.pass == Pass::backward ? 2 : 1);
  const double bytes = elements * static_cast<double>(size_bytes(cell.dtype)) + queries * sizeof(float);
  constexpr double kAddresses = 0x1p47;  // what a process can have on x86-64; a GPU says itself what it has
  const double most = cell.device.type == DeviceType::cpu ? memory_bytes() : kAddresses;
  if (bytes <= most) return;
  std::ostringstream expected;
  expected << std::setprecision(3) << "tensors of at most " << most * 1e-9 << " GB together, not " << bytes * 1e-9;
  throw too_large({{"batch", cell.batch},
                   {"heads", cell.heads},
                   {"kv-heads", cell.kv_heads},
                   {"n", cell.n_k},
                   {"n-q", cell.n_q},
                   {"d", cell.d}},
                  expected.str());
}

// Every combination of the lists, the innermost loop over patterns: rows to compare are neighbours.
std::vector<CellShape> all_cells(const BenchOptions& options) {
  std::vector<CellShape> cells;
  CellShape cell;
  cell.device = parse_device(options.device);
  cell.batch = options.batch;
  cell.heads = options.heads;
  cell.kv_heads = options.kv_heads.value_or(options.heads);
  for (const auto& [option, value] :
       {std::pair{"batch", cell.batch}, {"heads", cell.heads}, {"kv-heads", cell.kv_heads}}) {
    require_positive(option, value);
  }
  std::vector<std::string> patterns = options.patterns;
  if (patterns.empty()) {
    patterns = {"2:4", "1:2"};
    if (cell.device.type == DeviceType::cpu) patterns.insert(patterns.begin(), "dense");
  }
  for (const std::string& pass : options.passes) {
    cell.pass = parse_pass(pass);
    for (const std::string& dtype : options.dtypes) {
      cell.dtype = parse_dtype(dtype);
      for (const std::string& mask : options.masks) {
        cell.causal = parse_mask(mask);
        for (const std::int64_t d : options.d) {
          require_positive("d", cell.d = d);
          for (const std::int64_t n : options.n) {
            require_positive("n", cell.n_k = n);
            require_positive("n-q", cell.n_q = options.n_q.value_or(n));
            require_room(cell);
            for (const std::string& pattern : patterns) {
              cell.pattern = parse_pattern(pattern);
              for (const std::string& grouping : options.groupings) {
                cell.grouping = parse_grouping(grouping);
                for (const std::string& rest : options.rests) {
                  cell.rest = parse_rest(rest);
                  if (cell.pattern.is_dense()) cell.rest = Rest::drop;
                  cells.push_back(cell);
                  if (cell.pattern.is_dense()) break;  // nothing is pruned
                }
                if (cell.pattern.is_dense()) break;  // nor grouped
              }
            }
          }
        }
      }
    }
  }
  return cells;
}

void print_heading() {
  std::cout << "pass      dtype  mask      n_q    n_k    d  pattern  grouping     rest     median us    spread us"
               "  TFLOP/s  vs dense  kernel\n";
}

const char* rest_name(const CellShape& cell) {
  return cell.pattern.is_dense() ? "-" : cell.rest == Rest::mean ? "mean" : "drop";
}

void print_row(const CellShape& cell, const CellResult& result) {
  std::cout << std::left << std::setw(10) << (cell.pass == Pass::forward ? "forward" : "backward") << std::setw(7)
            << name(cell.dtype) << std::setw(7) << (cell.causal ? "causal" : "full") << std::right << std::setw(6)
            << cell.n_q << " " << std::setw(6) << cell.n_k << " " << std::setw(4) << cell.d << "  " << std::left
            << std::setw(9) << to_string(cell.pattern) << std::setw(12)
            << (cell.pattern.is_dense() ? "-" : to_string(cell.grouping)) << " " << std::setw(4) << rest_name(cell)
            << std::right << std::fixed << std::setprecision(1) << std::setw(13) << result.ours.median_us
            << std::setw(13) << result.ours.spread_us << std::setprecision(3) << std::setw(9) << result.ours.tflops;
  if (result.dense) {
    std::cout << std::setprecision(2) << std::setw(9) << result.dense->median_us / result.ours.median_us << "x";
  } else {
    std::cout << std::setw(10) << "-";
  }
  std::cout << "  " << result.ours.kernel << std::endl;
}

nlohmann::ordered_json row_json(const CellShape& cell, const CellResult& result) {
  nlohmann::ordered_json row = {{"kernel", result.ours.kernel},
                                {"pattern", to_string(cell.pattern)},
                                {"grouping", to_string(cell.grouping)},
                                {"rest", cell.rest == Rest::mean ? "mean" : "drop"},
                                {"dtype", name(cell.dtype)},
                                {"batch", cell.batch},
                                {"heads", cell.heads},
                                {"kv_heads", cell.kv_heads},
                                {"n_q", cell.n_q},
                                {"n_k", cell.n_k},
                                {"d", cell.d},
                                {"mask", cell.causal ? "causal" : "full"},
                                {"pass", cell.pass == Pass::forward ? "forward" : "backward"},
                                {"median_us", result.ours.median_us},
                                {"spread_us", result.ours.spread_us},
                                {"tflops", result.ours.tflops}};
  if (result.dense) {
    row["peers"]["dense"] = {
        {"kernel", result.dense->kernel}, {"median_us", result.dense->median_us}, {"tflops", result.dense->tflops}};
    row["ratio"]["dense"] = result.dense->median_us / result.ours.median_us;
  } else if (!cell.pattern.is_dense()) {
    row["peers"]["dense"] = nullptr;
    row["skipped"]["dense"] = "no kernel of this build computes it there";
  }
  return row;
}

nlohmann::ordered_json document(const std::string& command, Device device, nlohmann::ordered_json rows) {
  const BuildFacts build = build_facts();
  nlohmann::ordered_json all;
  all["command"] = command;
  all["commit"] = build.revision;
  all["date"] = now();
  all["device"] = {{"name", device_name(device)}, {"cores", cpu_threads()}};
  all["versions"] = {{"compiler", build.compiler}};
  if (!build.cuda.empty()) all["versions"]["cuda"] = build.cuda;
  all["rows"] = std::move(rows);
  return all;
}

void bench(const BenchOptions& options, const std::string& command) {
  if (!(options.cell.seconds > 0 && options.cell.seconds <= 3600)) {
    throw Error("seconds: expected above 0 and at most 3600, got " + std::to_string(options.cell.seconds));
  }
  const std::vector<CellShape> cells = all_cells(options);
  std::optional<OutputFile> json;
  if (!options.json.empty()) json.emplace("--json", options.json);
  const bool table = !json || !json->is_standard_output();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool alone = false;
  if (table) print_heading();
  Progress progress("bench", std::ssize(cells));
  for (const CellShape& cell : cells) {
    const CellResult result = time_cell(cell, options.cell);
    progress.clear();
    if (table) print_row(cell, result);
    alone |= !result.dense && !cell.pattern.is_dense();
    rows.push_back(row_json(cell, result));
    progress.show(std::ssize(rows));
  }
  progress.clear();
  if (alone && table) {
    std::cout << "Rows without \"vs dense\": no kernel of this build computes dense attention there (dspattn kernels "
                 "--pattern dense --device "
              << options.device << " says why). bench/forward/measure.py times PyTorch's dense kernels beside these.\n";
  }
  if (!json) return;
  // The command may name files in bytes that are no UTF-8.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  json->write([&](std::ostream& stream) {
    stream << document(command, parse_device(options.device), std::move(rows)).dump(1, ' ', false, kReplace) << "\n";
  });
  json->take_place();
}

}  // namespace

void register_bench(Parser& parser, Outcome& outcome) {
  Command command =
      parser.add_subcommand("bench", "Time the library on shapes of your choice, each pattern beside dense attention");
  auto options = std::make_shared<BenchOptions>();
  const auto list = [&](const char* name, auto& values, const char* text, const char* type) {
    command.add_option(name, values, text).delimiter(',').type_name(type).capture_default_str();
  };
  list("--n", options->n, "keys (and queries) per sequence", "LIST");
  list("--d", options->d, "head dimensions", "LIST");
  list("--pattern", options->patterns, "patterns, as N:M or dense (default: 2:4,1:2, on the CPU dense too)", "LIST");
  list("--grouping", options->groupings, "interleaved, consecutive", "LIST");
  list("--rest", options->rests, "drop, mean", "LIST");
  list("--dtype", options->dtypes, "fp32, fp16, bf16", "LIST");
  list("--mask", options->masks, "full, causal", "LIST");
  list("--pass", options->passes, "forward, backward", "LIST");
  command.add_option("--batch", options->batch, "sequences").type_name("COUNT").capture_default_str();
  command.add_option("--heads", options->heads, "query heads").type_name("COUNT").capture_default_str();
  command.add_option("--kv-heads", options->kv_heads, "key and value heads (default: heads)").type_name("COUNT");
  command.add_option("--n-q", options->n_q, "queries per sequence, where different from --n").type_name("COUNT");
  command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").type_name("NAME").capture_default_str();
  command.add_option("--kernel", options->cell.kernel, "force a kernel of the table by name").type_name("NAME");
  command.add_option("--threads", options->cell.threads, "CPU threads; 0: all")
      .type_name("COUNT")
      .capture_default_str();
  command.add_option("--seconds", options->cell.seconds, "time spent on each row and on its dense partner")
      .type_name("SECONDS")
      .capture_default_str();
  command
      .add_option("--json", options->json, "also write the rows to this file; - for standard output, without the table")
      .type_name("FILE");
  command.footer(R"(
Lists have commas between their items; every combination is timed. Each pattern alternates with the library's own dense
attention on the same data, where the device has it; "vs dense" above 1 means the pattern is faster. TFLOP/s counts the
dense work.
Examples:
  dspattn bench --n 512,1024,2048 --pattern 2:4,1:2
  dspattn bench --dtype fp32,bf16 --mask full,causal --pass forward,backward --json times.json
  dspattn bench --n 4096 --json - | jq '.rows[].tflops'
  dspattn bench --device cuda --dtype bf16 --n 4096,16384 --d 128 --heads 16)");
  command.callback([options, &outcome] { bench(*options, outcome.command_line); });
}

}  // namespace dspattn::apps
