// How a test that loads the emulated backend from Python chooses the order of things.
#include "cuda_emulation.h"

// order: 0 forward, 1 reverse, 2 random by seed. eager: cp.async copies at once.
extern "C" __attribute__((visibility("default"))) void steploop_emulation_set(int order, uint64_t seed, int eager,
                                                                              int num_threads) {
  cuda_emulation::settings() = {static_cast<cuda_emulation::Order>(order), seed, eager != 0, num_threads};
}
