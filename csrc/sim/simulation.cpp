// simulate: the order of events, and which replica a request goes to.
#include "sim/simulation.h"

#include <algorithm>
#include <memory>
#include <string_view>

#include "core/errors.h"
#include "sim/recorder.h"
#include "sim/replica.h"

namespace steploop {
namespace {

constexpr const char* kRoutingNames[] = {"round_robin", "least_outstanding", "prefix_affine"};
constexpr int32_t kMostReplicas = 1024;
constexpr int64_t kReportEvery = 4096;  // events

void validate(const SimulationOptions& options) {
  if (options.num_replicas < 1 || options.num_replicas > kMostReplicas)
    throw InvalidArgumentError(concat("num_replicas must be in 1..", kMostReplicas, ", got ", options.num_replicas));
  if (options.max_timeline_points < 2)
    throw InvalidArgumentError(concat("max_timeline_points must be >= 2, got ", options.max_timeline_points));
  if (!options.step_durations_us.empty() && options.num_replicas != 1)
    throw InvalidArgumentError(
        concat("step_durations_us are of one replica, but num_replicas is ", options.num_replicas));
  for (size_t i = 0; i < options.step_durations_us.size(); ++i)
    if (options.step_durations_us[i] < 1 || options.step_durations_us[i] > kLongestUs)
      throw InvalidArgumentError(concat("step_durations_us must be in 1..", kLongestUs, ", got ",
                                        options.step_durations_us[i], " for step ", i));
}

class Cluster {
 public:
  Cluster(const SchedulerConfig& config, const CostModel& cost, const SimulatedWorkload& workload,
          const SimulationOptions& options, Recorder& recorder, SimulationResult& result)
      : workload_(workload), options_(options), result_(result) {
    for (int32_t number = 0; number < options.num_replicas; ++number)
      replicas_.push_back(
          std::make_unique<Replica>(number, config, cost, workload, options.step_durations_us, recorder));
  }

  // Steps end before requests arrive, and requests arrive before steps begin: as in an engine, which takes in what has
  // come before it schedules.
  void run(FunctionRef<void(int64_t)> report) {
    size_t next = 0;
    for (int64_t event = 0;; ++event) {
      if (event % kReportEvery == 0) report(num_finished());
      int64_t now_us = next < workload_.num_requests() ? workload_.arrival_us[next] : Replica::kNever;
      for (const auto& replica : replicas_) now_us = std::min(now_us, replica->step_end_us());
      if (now_us == Replica::kNever) break;
      for (const auto& replica : replicas_) {
        if (replica->step_end_us() != now_us) continue;
        replica->end_step();
        result_.ended_us = now_us;
      }
      for (; next < workload_.num_requests() && workload_.arrival_us[next] <= now_us; ++next) arrive(next, now_us);
      for (const auto& replica : replicas_) replica->begin_step(now_us);
    }
    report(num_finished());
    for (const auto& replica : replicas_) {
      result_.replicas.push_back(replica->scheduler().stats());
      result_.busy_us.push_back(replica->busy_us());
    }
  }

 private:
  void arrive(size_t request, int64_t now_us) {
    try {
      StopCriteria stop;
      stop.max_tokens = workload_.max_tokens[request];
      // Before its tokens are made.
      const auto num_tokens = static_cast<size_t>(workload_.num_prompt_tokens[request]);
      replicas_.front()->scheduler().check_request(num_tokens, stop);
      std::vector<TokenId> prompt = make_prompt(workload_, request);
      const size_t replica = route(request, prompt);
      result_.requests[request].replica = static_cast<int32_t>(replica);
      replicas_[replica]->add(request, std::move(prompt), now_us);
    } catch (const RequestTooLongError& error) {
      throw RequestTooLongError(concat("request ", request, ": ", error.what()));
    } catch (const InvalidRequestError& error) {
      throw InvalidRequestError(concat("request ", request, ": ", error.what()));
    }
  }

  size_t route(size_t request, std::span<const TokenId> prompt) const {
    if (replicas_.size() == 1) return 0;
    if (options_.routing == Routing::kRoundRobin) return request % replicas_.size();
    size_t best = 0;
    int64_t least = Replica::kNever;
    for (size_t i = 0; i < replicas_.size(); ++i) {
      const BlockManager& blocks = replicas_[i]->scheduler().block_manager();
      int64_t num_tokens = replicas_[i]->num_outstanding_tokens();
      if (options_.routing == Routing::kPrefixAffine)
        num_tokens -=
            int64_t{blocks.match_prefix(prompt.first(prompt.size() - 1), workload_.cache_key(request)).num_blocks} *
            blocks.block_size();
      if (num_tokens >= least) continue;
      least = num_tokens;
      best = i;
    }
    return best;
  }

  int64_t num_finished() const {
    int64_t sum = 0;
    for (const auto& replica : replicas_) sum += replica->num_finished();
    return sum;
  }

  const SimulatedWorkload& workload_;
  const SimulationOptions& options_;
  SimulationResult& result_;
  std::vector<std::unique_ptr<Replica>> replicas_;
};

}  // namespace

Routing routing_from_name(const char* name) {
  for (size_t i = 0; i < std::size(kRoutingNames); ++i)
    if (std::string_view(kRoutingNames[i]) == name) return static_cast<Routing>(i);
  throw InvalidArgumentError(
      concat("routing must be one of round_robin, least_outstanding, prefix_affine, got \"", name, "\""));
}

SimulationResult simulate(const SchedulerConfig& config, const CostModel& cost, const SimulatedWorkload& workload,
                          const SimulationOptions& options, FunctionRef<void(int64_t)> report) {
  validate(options);
  validate(workload);
  SimulationResult result;
  Recorder recorder(workload.num_requests(), options, result);
  Cluster(config, cost, workload, options, recorder, result).run(report);
  recorder.end();
  return result;
}

}  // namespace steploop
