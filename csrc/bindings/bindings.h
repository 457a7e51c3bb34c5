// One registration function per class family of steploop._C.
#pragma once

#include <pybind11/pybind11.h>

namespace steploop {

struct SchedulerStats;
pybind11::dict to_dict(const SchedulerStats& stats);

class Engine;
pybind11::dict stats_of(const Engine& engine);
pybind11::list drain_iteration_stats(Engine& engine);
pybind11::dict take_profile(Engine& engine);

void bind_errors(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);
void bind_block_manager(pybind11::module_& m);
void bind_scheduler(pybind11::module_& m);
void bind_simulation(pybind11::module_& m);
void bind_model(pybind11::module_& m);
void bind_engine(pybind11::module_& m);

}  // namespace steploop
