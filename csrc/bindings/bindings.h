// One registration function per class family of steploop._C.
#pragma once

#include <pybind11/pybind11.h>

namespace steploop {

void bind_errors(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);
void bind_scheduler(pybind11::module_& m);
void bind_model(pybind11::module_& m);
void bind_engine(pybind11::module_& m);

}  // namespace steploop
