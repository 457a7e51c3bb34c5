// A small harness for the micro-benchmarks: warm-up, repeats, median, one line per result.
//   bench::Runner runner(argc, argv);                  // --json, --filter TEXT, --repeats N, --min-time-ms N, --help
//   runner.run("name", {.work = 1024, .unit = "token"}, [&] { ... });
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

// Keeps a value, and what led to it, from being optimised away.
template <class T>
inline void keep(const T& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A further figure of a result, e.g. {"GB/s", bytes / 1e9}: amount per second at the median.
struct Rate {
  const char* unit;
  double amount;  // of one time
};

struct Options {
  double work = 1;                // items that one call handles
  double times_per_call = 1;      // how often a call does what is timed; all figures are of one time
  const char* unit = "call";      // what an item is
  std::vector<Rate> rates{};
};

struct Result {
  std::string name;
  double median_s = 0;  // of one call
  double fastest_s = 0;
  double slowest_s = 0;
};

struct Defaults {
  int repeats = 9;
  double min_time_ms = 20;
};

class Runner {
 public:
  Runner(int argc, char** argv, Defaults defaults = {})
      : repeats_(defaults.repeats), min_time_s_(defaults.min_time_ms * 1e-3) {
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      const auto value = [&]() -> const char* {
        if (++i < argc) return argv[i];
        std::fprintf(stderr, "%s needs a value\n", argv[i - 1]);
        std::exit(2);
      };
      if (argument == "--json")
        json_ = true;
      else if (argument == "--filter")
        filter_ = value();
      else if (argument == "--repeats")
        repeats_ = std::max(1, std::atoi(value()));
      else if (argument == "--min-time-ms")
        min_time_s_ = std::max(0.01, std::atof(value())) * 1e-3;
      else
        usage(argv[0], argument == "--help" ? 0 : 2);
    }
  }

  // Something about the run itself: its own line in JSON, a heading otherwise.
  void note(const char* key, const char* value) const {
    std::printf(json_ ? "{\"%s\": \"%s\"}\n" : "# %s: %s\n", key, value);
  }

  bool wants(std::string_view name) const { return name.find(filter_) != std::string_view::npos; }

  // Times `call`. Each repeat makes as many calls as fill min_time; the median over the repeats counts, because other
  // work on the machine only ever makes a repeat slower.
  template <class Call>
  Result run(const std::string& name, const Options& options, Call&& call) {
    if (!wants(name)) return {name};
    const double start = now_s();
    int64_t num_warm_up_calls = 0;
    do {
      call();
      ++num_warm_up_calls;
    } while (now_s() - start < min_time_s_);
    const double estimate_s = (now_s() - start) / static_cast<double>(num_warm_up_calls);
    const auto calls_per_repeat = std::max<int64_t>(1, static_cast<int64_t>(min_time_s_ / estimate_s));
    return run_repeats(name, options, calls_per_repeat, call);
  }

  // For calls that change what they work on (a growing sequence): exactly `num_calls` per repeat, after `prepare`.
  template <class Prepare, class Call>
  Result run_prepared(const std::string& name, const Options& options, int64_t num_calls, Prepare&& prepare,
                      Call&& call) {
    if (!wants(name)) return {name};
    prepare();
    for (int64_t i = 0; i < num_calls; ++i) call();  // warm-up
    return run_repeats(name, options, num_calls, call, prepare);
  }

 private:
  struct Nothing {
    void operator()() const {}
  };

  template <class Call, class Prepare = Nothing>
  Result run_repeats(const std::string& name, const Options& options, int64_t num_calls, Call& call,
                     Prepare&& prepare = {}) {
    std::vector<double> seconds;
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      prepare();
      const double start = now_s();
      for (int64_t i = 0; i < num_calls; ++i) call();
      seconds.push_back((now_s() - start) / (static_cast<double>(num_calls) * options.times_per_call));
    }
    std::sort(seconds.begin(), seconds.end());
    const Result result{name, seconds[seconds.size() / 2], seconds.front(), seconds.back()};
    print(result, options);
    return result;
  }

  void print(const Result& result, const Options& options) {
    const double item_ns = result.median_s * 1e9 / options.work;
    if (json_) {
      std::printf(
          "{\"name\": \"%s\", \"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f, \"repeats\": %d, "
          "\"work\": %.0f, \"unit\": \"%s\", \"ns_per_%s\": %.3f",
          result.name.c_str(), result.median_s * 1e6, result.fastest_s * 1e6, result.slowest_s * 1e6, repeats_,
          options.work, options.unit, options.unit, item_ns);
      for (const Rate& rate : options.rates) std::printf(", \"%s\": %.3f", rate.unit, rate.amount / result.median_s);
      std::printf("}\n");
    } else {
      if (!header_printed_) std::printf("%-44s %12s %12s %12s\n", "", "median us", "min us", "max us");
      header_printed_ = true;
      std::printf("%-44s %12.3f %12.3f %12.3f", result.name.c_str(), result.median_s * 1e6, result.fastest_s * 1e6,
                  result.slowest_s * 1e6);
      if (options.work != 1) std::printf("  %10.2f ns/%s", item_ns, options.unit);
      for (const Rate& rate : options.rates) std::printf("  %9.2f %s", rate.amount / result.median_s, rate.unit);
      std::printf("\n");
    }
    std::fflush(stdout);
  }

  [[noreturn]] static void usage(const char* program, int exit_code) {
    std::fprintf(exit_code ? stderr : stdout, "usage: %s [--json] [--filter TEXT] [--repeats N] [--min-time-ms N]\n",
                 program);
    std::exit(exit_code);
  }

  bool json_ = false;
  bool header_printed_ = false;
  std::string filter_;
  int repeats_;
  double min_time_s_;
};

}  // namespace bench
