// The native module steploop._C.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of steploop: models, the engine and its scheduler.";
  m.attr("__version__") = STEPLOOP_VERSION;
  steploop::bind_errors(m);
  steploop::bind_sampling(m);
  steploop::bind_block_manager(m);
  steploop::bind_scheduler(m);
  steploop::bind_simulation(m);
  steploop::bind_model(m);
  steploop::bind_engine(m);
}
