// Python: the simulator. Columns come and go as numpy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "sim/simulation.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace steploop {
namespace {

constexpr std::pair<const char*, double CostModelConfig::*> kCostFields[] = {
    {"weight_bytes", &CostModelConfig::weight_bytes},
    {"weight_flops_per_token", &CostModelConfig::weight_flops_per_token},
    {"output_bytes", &CostModelConfig::output_bytes},
    {"output_flops_per_row", &CostModelConfig::output_flops_per_row},
    {"kv_bytes_per_token", &CostModelConfig::kv_bytes_per_token},
    {"attention_flops_per_pair", &CostModelConfig::attention_flops_per_pair},
    {"block_bytes", &CostModelConfig::block_bytes},
    {"bytes_per_second", &CostModelConfig::bytes_per_second},
    {"flops_per_second", &CostModelConfig::flops_per_second},
    {"host_bytes_per_second", &CostModelConfig::host_bytes_per_second},
    {"weight_bandwidth_efficiency", &CostModelConfig::weight_bandwidth_efficiency},
    {"compute_efficiency", &CostModelConfig::compute_efficiency},
    {"kv_bandwidth_efficiency", &CostModelConfig::kv_bandwidth_efficiency},
    {"attention_compute_efficiency", &CostModelConfig::attention_compute_efficiency},
    {"overlap", &CostModelConfig::overlap},
    {"step_us", &CostModelConfig::step_us},
    {"sequence_us", &CostModelConfig::sequence_us},
    {"sample_row_us", &CostModelConfig::sample_row_us},
    {"token_us", &CostModelConfig::token_us},
};

CostModel make_cost_model(const std::map<std::string, double>& fields) {
  CostModelConfig config;
  size_t num_known = 0;
  for (const auto& [name, member] : kCostFields) {
    const auto found = fields.find(name);
    if (found == fields.end()) throw InvalidArgumentError(concat("a cost model needs ", name));
    config.*member = found->second;
    ++num_known;
  }
  if (num_known != fields.size()) throw InvalidArgumentError("a cost model has fields that are not known");
  return CostModel(config);
}

// No conversion: what is no integer shall not become one.
template <class T>
using Column = py::array_t<T, py::array::c_style>;

template <class T>
std::span<const T> span_of(const char* name, const Column<T>& column) {
  if (column.ndim() != 1) throw InvalidArgumentError(concat(name, " must have 1 dimension, got ", column.ndim()));
  return {column.data(), static_cast<size_t>(column.size())};
}

template <class T>
std::span<const T> span_of(const char* name, const std::optional<Column<T>>& column) {
  return column ? span_of(name, *column) : std::span<const T>();
}

template <class T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

template <class Item, class T>
py::array_t<T> column_of(const std::vector<Item>& items, T Item::* member) {
  py::array_t<T> out(static_cast<py::ssize_t>(items.size()));
  T* data = out.mutable_data();
  for (const Item& item : items) *data++ = item.*member;
  return out;
}

py::dict to_dict(const std::vector<SimulatedRequest>& requests) {
  py::dict columns;
  columns["scheduled_us"] = column_of(requests, &SimulatedRequest::scheduled_us);
  columns["first_token_us"] = column_of(requests, &SimulatedRequest::first_token_us);
  columns["last_token_us"] = column_of(requests, &SimulatedRequest::last_token_us);
  columns["longest_gap_us"] = column_of(requests, &SimulatedRequest::longest_gap_us);
  columns["num_output_tokens"] = column_of(requests, &SimulatedRequest::num_output_tokens);
  columns["num_preemptions"] = column_of(requests, &SimulatedRequest::num_preemptions);
  columns["num_cached_tokens"] = column_of(requests, &SimulatedRequest::num_cached_tokens);
  columns["replica"] = column_of(requests, &SimulatedRequest::replica);
  return columns;
}

py::dict to_dict(const std::vector<TimelinePoint>& timeline) {
  py::dict columns;
  columns["began_us"] = column_of(timeline, &TimelinePoint::began_us);
  columns["ended_us"] = column_of(timeline, &TimelinePoint::ended_us);
  columns["busy_us"] = column_of(timeline, &TimelinePoint::busy_us);
  columns["sequences_us"] = column_of(timeline, &TimelinePoint::sequences_us);
  columns["unfinished_us"] = column_of(timeline, &TimelinePoint::unfinished_us);
  columns["used_blocks_us"] = column_of(timeline, &TimelinePoint::used_blocks_us);
  columns["num_steps"] = column_of(timeline, &TimelinePoint::num_steps);
  columns["num_prompt_tokens"] = column_of(timeline, &TimelinePoint::num_prompt_tokens);
  columns["num_decode_tokens"] = column_of(timeline, &TimelinePoint::num_decode_tokens);
  columns["longest_step_us"] = column_of(timeline, &TimelinePoint::longest_step_us);
  return columns;
}

py::dict to_dict(const SimulatedSchedule& schedule) {
  py::dict columns;
  columns["began_us"] = to_array(schedule.began_us);
  columns["duration_us"] = to_array(schedule.duration_us);
  columns["replica"] = to_array(schedule.replica);
  columns["num_preempted"] = to_array(schedule.num_preempted);
  columns["num_used_blocks"] = to_array(schedule.num_used_blocks);
  columns["num_tokens"] = to_array(schedule.num_tokens);
  columns["num_sample_rows"] = to_array(schedule.num_sample_rows);
  columns["num_decode_keys"] = to_array(schedule.num_decode_keys);
  columns["num_prompt_pairs"] = to_array(schedule.num_prompt_pairs);
  columns["offsets"] = to_array(schedule.offsets);
  columns["requests"] = to_array(schedule.requests);
  columns["first_tokens"] = to_array(schedule.first_tokens);
  columns["token_counts"] = to_array(schedule.token_counts);
  return columns;
}

py::dict to_dict(const LatencyHistogram& histogram, const std::vector<double>& quantiles) {
  py::dict figures;
  figures["count"] = histogram.count();
  figures["mean_us"] = histogram.mean_us();
  figures["max_us"] = histogram.max_us();
  std::vector<double> values;
  for (const double share : quantiles) values.push_back(histogram.quantile_us(share));
  figures["quantiles_us"] = values;
  return figures;
}

py::dict to_dict(const SimulationResult& result, const std::vector<double>& quantiles) {
  py::dict dict;
  dict["requests"] = to_dict(result.requests);
  dict["inter_token"] = to_dict(result.inter_token, quantiles);
  dict["timeline"] = to_dict(result.timeline);
  py::list replicas;
  for (size_t i = 0; i < result.replicas.size(); ++i) {
    replicas.append(to_dict(result.replicas[i]));
    replicas[i]["busy_us"] = result.busy_us[i];
  }
  dict["replicas"] = replicas;
  dict["ended_us"] = result.ended_us;
  py::dict spans;
  spans["request"] = column_of(result.spans, &BatchSpan::request);
  spans["began_us"] = column_of(result.spans, &BatchSpan::began_us);
  spans["ended_us"] = column_of(result.spans, &BatchSpan::ended_us);
  dict["spans"] = spans;
  dict["schedule"] = to_dict(result.schedule);
  return dict;
}

py::dict run(const SchedulerConfig& config, const CostModel& cost, const Column<int64_t>& arrival_us,
             const Column<int32_t>& num_prompt_tokens, const Column<int32_t>& num_output_tokens,
             const Column<int32_t>& max_tokens, const std::optional<Column<int32_t>>& priorities,
             const std::optional<Column<int32_t>>& tenants, const std::optional<Column<int64_t>>& segment_offsets,
             const std::optional<Column<int64_t>>& segment_contents,
             const std::optional<Column<int32_t>>& segment_lengths, int32_t num_replicas, const std::string& routing,
             const std::optional<Column<int64_t>>& step_durations_us, int32_t max_timeline_points, bool record_spans,
             bool record_schedule, const std::vector<double>& quantiles, const py::object& report) {
  const SimulatedWorkload workload{.arrival_us = span_of("arrival_us", arrival_us),
                                   .num_prompt_tokens = span_of("num_prompt_tokens", num_prompt_tokens),
                                   .num_output_tokens = span_of("num_output_tokens", num_output_tokens),
                                   .max_tokens = span_of("max_tokens", max_tokens),
                                   .priorities = span_of("priorities", priorities),
                                   .tenants = span_of("tenants", tenants),
                                   .segment_offsets = span_of("segment_offsets", segment_offsets),
                                   .segment_contents = span_of("segment_contents", segment_contents),
                                   .segment_lengths = span_of("segment_lengths", segment_lengths)};
  const SimulationOptions options{.num_replicas = num_replicas,
                                  .routing = routing_from_name(routing.c_str()),
                                  .max_timeline_points = max_timeline_points,
                                  .record_spans = record_spans,
                                  .record_schedule = record_schedule,
                                  .step_durations_us = span_of("step_durations_us", step_durations_us)};
  SimulationResult result;
  {
    const py::gil_scoped_release released;
    result = simulate(config, cost, workload, options, [&report](int64_t num_finished) {
      const py::gil_scoped_acquire acquired;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!report.is_none()) report(num_finished);
    });
  }
  return to_dict(result, quantiles);
}

}  // namespace

void bind_simulation(py::module_& m) {
  py::class_<CostModel>(m, "CostModel", "How long a step takes on some device: a roofline with named efficiencies.")
      .def(py::init(&make_cost_model), "fields"_a,
           "All fields of CostModelConfig by name, in bytes, operations, seconds and microseconds as their names say. "
           "Raises InvalidArgumentError.")
      .def(
          "duration_us",
          [](const CostModel& cost, int64_t num_tokens, int64_t num_sequences, int64_t num_sample_rows,
             int64_t num_decode_keys, int64_t num_prompt_pairs, int64_t num_transfer_blocks) {
            return cost.duration_us(
                {num_tokens, num_sequences, num_sample_rows, num_decode_keys, num_prompt_pairs, num_transfer_blocks});
          },
          py::kw_only(), "num_tokens"_a, "num_sequences"_a, "num_sample_rows"_a, "num_decode_keys"_a = 0,
          "num_prompt_pairs"_a = 0, "num_transfer_blocks"_a = 0,
          "Of a step with so many tokens, sequences and sampled rows; keys that sequences with one token attend to; "
          "(query, key) pairs of those with more; and KV blocks that move to the host or back.");
  m.def(
      "simulate", &run, "config"_a, "cost"_a, py::kw_only(), "arrival_us"_a, "num_prompt_tokens"_a,
      "num_output_tokens"_a, "max_tokens"_a, "priorities"_a = py::none(), "tenants"_a = py::none(),
      "segment_offsets"_a = py::none(), "segment_contents"_a = py::none(), "segment_lengths"_a = py::none(),
      "num_replicas"_a = 1, "routing"_a = "least_outstanding", "step_durations_us"_a = py::none(),
      "max_timeline_points"_a = 2048, "record_spans"_a = false, "record_schedule"_a = false,
      "quantiles"_a = std::vector<double>{0.5, 0.9, 0.99}, "report"_a = py::none(),
      "Serves requests with the engine's scheduler on a virtual clock. Columns are arrays of the named types, one value "
      "a request: times int64, numbers of tokens int32. A prompt is a chain of segments (offsets int64 [requests + 1], "
      "contents int64, lengths int32): those of one content begin with the same tokens, and a request's output goes on with "
      "its last segment's. step_durations_us: how long each step takes, instead of the cost model's. report: told now "
      "and then how many requests have ended. Returns columns by request, over time and by step. Raises "
      "InvalidArgumentError, InvalidRequestError, RequestTooLongError; what report raises, and KeyboardInterrupt.");
}

}  // namespace steploop
