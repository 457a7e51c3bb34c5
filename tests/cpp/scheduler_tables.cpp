// Runs the scenarios of tests/scenarios through the scheduler and compares each step with its row of the table.
//   scheduler_tables [--print] [FILE...]
// Stops at the first step that differs. --print writes the files as they would read if what happens were right.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "fake_kv.h"
#include "scenario_file.h"
#include "scenario_names.h"
#include "sched/scheduler.h"

using namespace steploop;
using namespace scenarios;

namespace {

constexpr int32_t kMaxSteps = 5000;  // of a scenario

class Runner {
 public:
  Runner(const Scenario& scenario, bool is_printing) : scenario_(scenario), is_printing_(is_printing) {}

  // Throws Error at the first difference, unless printing.
  void run() {
    for (const Line& line : scenario_.lines) {
      line_ = line.number;
      const std::string_view text = trimmed(line.text);
      if (Row::is_row(text)) {
        compare(Row(text));
        continue;
      }
      printed_.push_back({line.text, {}});
      if (text.starts_with("step ") && text.find('|') != std::string_view::npos)
        read_header(text);
      else if (!text.empty() && text[0] != '#' && !text.starts_with("=="))
        act(std::string(text));
    }
    if (scheduler_) run_to_end();
  }

  int line() const { return line_; }
  int32_t num_steps() const { return num_steps_; }

  void print() const {
    std::vector<size_t> widths(columns_.size() + 1);
    for (const Printed& printed : printed_)
      for (size_t i = 0; i < printed.cells.size(); ++i) widths[i] = std::max(widths[i], printed.cells[i].size());
    for (const Printed& printed : printed_) {
      std::string line = printed.text;
      for (size_t i = 0; i < printed.cells.size(); ++i) {
        line += (i ? " | " : "") + printed.cells[i];
        if (i + 1 < printed.cells.size()) line += std::string(widths[i] - printed.cells[i].size(), ' ');
      }
      line.resize(line.find_last_not_of(' ') + 1);
      std::printf("%s\n", line.c_str());
    }
  }

 private:
  // A line as it is, or the cells of a row or a header, the step's first.
  struct Printed {
    std::string text;
    std::vector<std::string> cells;
  };

  void read_header(std::string_view text) {
    columns_ = split(text, '|');
    printed_.back() = {"", columns_};
    columns_.erase(columns_.begin());
    for (const std::string& column : columns_) {
      static const std::vector<std::string> kNames = {"scheduled", "blocks", "host",    "transfers",
                                                      "preempted", "ended",  "started", "found"};
      if (std::find(kNames.begin(), kNames.end(), column) == kNames.end() && !kCounters.contains(column))
        throw Error("there is no column \"" + column + "\"");
    }
  }

  // ---- Actions ----

  void act(const std::string& line) {
    if (line.starts_with("during ")) return during_.push_back(line.substr(7));
    const size_t arrow = line.find("=>");
    if (arrow == std::string::npos) return act_now(split(line, ' '));
    const std::string expected(trimmed(std::string_view(line).substr(arrow + 2)));
    const size_t colon = std::min(expected.find(':'), expected.size());
    const std::string part(trimmed(std::string_view(expected).substr(std::min(colon + 1, expected.size()))));
    try {
      act_now(split(line.substr(0, arrow), ' '));
    } catch (const Error& error) {
      if (error_name(error) == expected.substr(0, colon) && std::string(error.what()).find(part) != std::string::npos)
        return;
      throw Error(concat("expected ", expected, ", got ", error_name(error), ": ", error.what()));
    }
    throw Error(concat("expected ", expected, ", got no error"));
  }

  void act_now(const std::vector<std::string>& words) {
    const std::string verb = words[0];
    if (verb == "config") {
      const SchedulerConfig config = read_config(Options(words, 1));
      scheduler_.emplace(config);
      kv_.emplace(config.blocks);
      return;
    }
    if (!scheduler_) throw Error("a scenario begins with config");
    const auto word = [&](size_t i) { return i < words.size() ? words[i] : throw Error(verb + ": a word is missing"); };
    if (verb == "add")
      add(word(1), Options(words, 2));
    else if (verb == "abort")
      abort(id(word(1)));
    else if (verb == "drop")
      abort(id(word(1))), tokens_[id(word(1))] = kLeftOut;
    else if (verb == "reset_prefix_cache")
      scheduler_->reset_prefix_cache();
    else if (verb == "now")
      now_us_ = number<int64_t>(word(1));
    else if (verb == "duration")
      step_us_ = number<int64_t>(word(1)), token_us_ = number<int64_t>(word(3));
    else if (verb == "token")
      tokens_[id(word(1))] = number<TokenId>(word(2));
    else if (verb == "fail")
      tokens_[id(word(1))] = kFails;
    else if (verb == "then")
      end_as({words.begin() + 1, words.end()});
    else if (verb == "unchanged")
      idle();
    else
      throw Error("there is no action \"" + verb + "\"");
    scheduler_->check_integrity();
  }

  void add(const std::string& name, Options options) {
    int32_t num_tokens = 1, num_samples = 1;
    StopCriteria stop;
    SequenceOptions given;
    options.read("prompt", num_tokens);
    options.read("max_tokens", stop.max_tokens);
    options.read("min_tokens", stop.min_tokens);
    options.read("samples", num_samples);
    options.read("priority", given.priority);
    options.read("key", given.cache_key);
    options.read("deadline", given.deadline_us);
    options.read("scores_prompt", given.scores_prompt);
    given.tenant = options.text("tenant");
    if (const std::string token = options.text("stop"); !token.empty()) stop.stop_token_ids = {number<TokenId>(token)};
    if (const std::string token = options.text("eos"); !token.empty()) stop.eos_token_ids = {number<TokenId>(token)};
    const auto known = std::find(names_.begin(), names_.end(), name);
    const SequenceId first = known - names_.begin();
    const std::string prefix = options.text("prefix"), before = options.text("after");
    options.done();
    if (known == names_.end()) names_.push_back(name);
    scheduler_->add(first, prompt(first, num_tokens, prefix, before), stop, now_us_, given);
    for (int32_t i = 1; i < num_samples; ++i) {
      scheduler_->add_sample(static_cast<SequenceId>(names_.size()), first);
      names_.push_back(concat(name, ".", i));
    }
  }

  // Tokens of text x, or of the sequence's own, are numbered from a base of their own.
  std::vector<TokenId> prompt(SequenceId own, int32_t num_tokens, const std::string& prefix,
                              const std::string& before) {
    std::vector<TokenId> tokens;
    if (!before.empty()) tokens = scheduler_->find(id(before))->tokens;
    for (const std::string& part : prefix.empty() ? std::vector<std::string>{} : split(prefix, ',')) {
      const int32_t most = part.size() > 2 ? number<int32_t>(part.substr(2)) : num_tokens;
      for (int32_t i = 0; i < most; ++i) tokens.push_back((part[0] - 'a' + 1) * 10000 + i);
    }
    for (int32_t i = 0; static_cast<int32_t>(tokens.size()) < num_tokens; ++i)
      tokens.push_back(static_cast<TokenId>(own + 100) * 10000 + i);
    tokens.resize(static_cast<size_t>(num_tokens));
    return tokens;
  }

  void abort(SequenceId sequence) {
    const Sequence* known = scheduler_->find(sequence);
    const bool is_unfinished = known && known->state != SequenceState::kFinished;
    const Sequence* aborted = scheduler_->abort(sequence, now_us_);
    if (is_unfinished ? aborted != known || aborted->finish_reason != FinishReason::kAbort : aborted != nullptr)
      throw Error("abort of " + name(sequence) + " gave the wrong answer");
  }

  // ---- Steps ----

  void compare(const Row& expected) {
    if (!scheduler_ || columns_.empty()) throw Error("a row needs a config and a header before it");
    if (expected.first_step != num_steps_ + 1) throw Error(concat("this is step ", num_steps_ + 1));
    std::vector<Printed> happened;
    for (int32_t step_number = expected.first_step; step_number <= expected.last_step; ++step_number) {
      const std::vector<std::string> got = step();
      for (size_t i = 0; i < columns_.size() && !is_printing_; ++i) {
        std::string wanted = i < expected.cells.size() ? expected.cells[i] : "";
        if (columns_[i] == "scheduled") wanted = advanced(wanted, step_number - expected.first_step);
        if (wanted != got[i]) throw Error(concat(columns_[i], "\n  expected ", wanted, "\n  got      ", got[i]));
      }
      if (is_printing_) add_printed(got);
    }
  }

  void add_printed(const std::vector<std::string>& got) {
    std::vector<std::string> cells{std::to_string(num_steps_)};
    cells.insert(cells.end(), got.begin(), got.end());
    if (!printed_.back().cells.empty() && Row::is_row(printed_.back().cells[0])) {
      std::vector<std::string>& last = printed_.back().cells;
      const int32_t first = number<int32_t>(split(last[0], '-')[0]);
      bool goes_on = true;
      for (size_t i = 0; i < got.size() && goes_on; ++i)
        goes_on = got[i] == (columns_[i] == "scheduled" ? advanced(last[i + 1], num_steps_ - first) : last[i + 1]);
      if (goes_on) {
        last[0] = concat(first, "-", num_steps_);
        return;
      }
    }
    printed_.push_back({"", cells});
  }

  std::vector<std::string> step() {
    if (++num_steps_ > kMaxSteps) throw Error("it does not come to an end");
    std::map<std::string, std::string> cells;
    const SchedulerOutput& output = scheduler_->schedule(now_us_);
    scheduler_->check_integrity();
    check_output(output);
    describe(output, cells);
    kv_->run(output);
    for (const std::string& action : std::exchange(during_, {})) act(action);
    now_us_ += output.empty() ? 0 : step_us_ + token_us_ * output.num_scheduled_tokens;
    std::vector<std::string> ended;
    for (const Sequence* sequence : output.timed_out) ended.push_back(end_of(*sequence));
    for (const Sequence* sequence : update(output)) ended.push_back(end_of(*sequence));
    scheduler_->check_integrity();
    for (const std::string& end : ended) ends_.push_back(concat(end, "@", num_steps_));
    cells["ended"] = joined(ended, " ");
    const SchedulerStats stats = scheduler_->stats();
    if (stats.num_free_kv_blocks + stats.num_cached_kv_blocks + stats.num_used_kv_blocks != stats.num_kv_blocks)
      throw Error("free, cached and used blocks are not all blocks");
    std::vector<std::string> row;
    for (const std::string& column : columns_)
      row.push_back(kCounters.contains(column) ? std::to_string(kCounters.at(column)({stats, output})) : cells[column]);
    return row;
  }

  // What holds in every step of every scenario.
  void check_output(const SchedulerOutput& output) const {
    const SchedulerConfig& config = scheduler_->config();
    if (output.empty() == scheduler_->has_unfinished()) throw Error("an idle step with work left, or the reverse");
    const int32_t num_running = scheduler_->stats().num_running;
    if (num_running > config.max_num_seqs) throw Error("more than max_num_seqs run");
    if (output.num_scheduled_tokens > config.max_num_batched_tokens) throw Error("the budget is exceeded");
    if (output.num_prompt_tokens + output.num_decode_tokens != output.num_scheduled_tokens)
      throw Error("prompt and decode tokens are not all tokens");
    int32_t num_tokens = 0, num_samples = 0;
    for (const ScheduledSequence& scheduled : output.scheduled) {
      num_tokens += scheduled.num_scheduled_tokens;
      num_samples += scheduled.num_sample_rows;
    }
    if (num_tokens != output.num_scheduled_tokens || num_samples != output.num_sample_rows)
      throw Error("the totals of the step are wrong");
    const bool may_preempt =
        config.policy == SchedulingPolicy::kOnDemand || config.policy == SchedulingPolicy::kEstimate;
    if (!may_preempt && !output.preempted.empty()) throw Error("a policy that never preempts did");
  }

  void describe(const SchedulerOutput& output, std::map<std::string, std::string>& cells) const {
    const auto add = [&cells](const char* column, const std::string& text) {
      std::string& cell = cells[column];
      cell += (cell.empty() ? "" : " ") + text;
    };
    for (const ScheduledSequence& scheduled : output.scheduled)
      add("scheduled", concat(name(scheduled.sequence->id), ":", scheduled.first_token, "+",
                              scheduled.num_scheduled_tokens, scheduled.num_sample_rows ? "*" : ""));
    for (size_t i = 0; i < names_.size(); ++i) {
      const Sequence* sequence = scheduler_->find(static_cast<SequenceId>(i));
      if (!sequence) continue;
      if (sequence->blocks.num_blocks() > 0) add("blocks", names_[i] + block_list(sequence->blocks.blocks));
      if (!sequence->host_blocks.empty()) add("host", names_[i] + block_list(sequence->host_blocks));
      if (sequence->first_scheduled_us >= 0)
        add("started", concat(names_[i], ":", sequence->first_scheduled_us,
                              sequence->first_token_us < 0 ? "" : concat("-", sequence->first_token_us)));
      if (sequence->num_prefix_hit_tokens > 0) add("found", concat(names_[i], ":", sequence->num_prefix_hit_tokens));
    }
    for (const BlockTransfer& transfer : output.transfers)
      add("transfers", concat(transfer.src_pool == kHostPool ? "h" : "", transfer.src_block, ">",
                              transfer.dst_pool == kHostPool ? "h" : "", transfer.dst_block));
    for (const SequenceId sequence : output.preempted) add("preempted", name(sequence));
  }

  std::span<const Sequence* const> update(const SchedulerOutput& output) {
    std::vector<TokenId> tokens;
    tokens.reserve(output.scheduled.size());  // the spans below point into it
    std::vector<SampledTokens> samples;
    for (const ScheduledSequence& scheduled : output.scheduled) {
      if (scheduled.num_sample_rows == 0) continue;
      const SequenceId sequence = scheduled.sequence->id;
      const auto found = tokens_.find(sequence);
      tokens.push_back(found != tokens_.end() ? found->second : static_cast<TokenId>(sequence) + 1000);
      if (tokens.back() == kLeftOut) continue;
      const bool fails = tokens.back() == kFails;
      samples.push_back({sequence, std::span(&tokens.back(), fails ? 0 : 1), fails ? 0 : 1, fails});
    }
    tokens_.clear();
    return scheduler_->update(output.step_id, samples, now_us_);
  }

  void end_as(const std::vector<std::string>& expected) {
    ends_.clear();
    run_to_end();
    if (is_printing_)
      printed_.back().text = "then " + joined(ends_, " ");
    else if (ends_ != expected)
      throw Error(concat("then\n  expected ", joined(expected, " "), "\n  got      ", joined(ends_, " ")));
  }

  void run_to_end() {
    while (scheduler_->has_unfinished()) step();
    const SchedulerStats stats = scheduler_->stats();
    if (stats.num_used_kv_blocks != 0 || stats.num_used_host_blocks != 0 || stats.num_kv_tokens != 0)
      throw Error("blocks are held though nothing is unfinished");
  }

  void idle() {
    if (scheduler_->has_unfinished()) throw Error("there is something to do");
    const int64_t steps_before = scheduler_->stats().num_steps;
    step();
    if (scheduler_->stats().num_steps != steps_before) throw Error("an idle step was counted");
    --num_steps_;
  }

  SequenceId id(const std::string& name) const {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) throw Error("there is no sequence " + name);
    return found - names_.begin();
  }
  std::string name(SequenceId sequence) const { return names_.at(static_cast<size_t>(sequence)); }
  std::string end_of(const Sequence& sequence) const {
    return name(sequence.id) + ":" + finish_reason_name(sequence.finish_reason);
  }
  static std::string block_list(const std::vector<BlockId>& blocks) {
    std::string text;
    for (const BlockId block : blocks) text += concat(text.empty() ? "" : ",", block);
    return concat("[", text, "]");
  }

  static constexpr TokenId kFails = -1, kLeftOut = -2;

  const Scenario& scenario_;
  const bool is_printing_;
  std::optional<Scheduler> scheduler_;
  std::optional<FakeKv> kv_;
  std::vector<std::string> names_;  // by sequence id
  std::vector<std::string> columns_;
  std::vector<Printed> printed_;
  std::map<SequenceId, TokenId> tokens_;          // what the next step samples
  std::vector<std::string> during_;  // actions for the next step
  std::vector<std::string> ends_;                 // since the last `then`
  int64_t now_us_ = 0, step_us_ = 0, token_us_ = 0;
  int32_t num_steps_ = 0;
  int line_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  bool is_printing = false;
  std::vector<std::string> paths;
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "--print")
      is_printing = true;
    else
      paths.emplace_back(argv[i]);
  if (paths.empty())
    for (const auto& entry : std::filesystem::directory_iterator(STEPLOOP_SCENARIOS))
      if (entry.path().extension() == ".txt") paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());

  int num_scenarios = 0;
  int64_t num_steps = 0;
  for (const std::string& path : paths)
    for (const Scenario& scenario : read_scenarios(path)) {
      Runner runner(scenario, is_printing);
      try {
        runner.run();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s:%d: %s\n  step %d: %s\n", path.c_str(), runner.line(), scenario.title.c_str(),
                     runner.num_steps(), error.what());
        return 1;
      }
      if (is_printing) runner.print();
      num_scenarios += !scenario.title.empty();
      num_steps += runner.num_steps();
    }
  if (!is_printing) std::printf("%d scenarios, %lld steps\n", num_scenarios, static_cast<long long>(num_steps));
  return num_scenarios > 0 ? 0 : 1;
}
