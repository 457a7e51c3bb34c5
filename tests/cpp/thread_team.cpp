// ThreadTeam: many short runs with barriers, on more threads than processors too; parking; exceptions.
#include "core/thread_team.h"

#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/errors.h"

using namespace steploop;

namespace {

// Every member adds its neighbour's value of the round before: wrong as soon as one barrier lets somebody pass early.
bool ring(int num_threads, int num_runs, int num_rounds) {
  ThreadTeam team(num_threads);
  const auto size = static_cast<size_t>(num_threads);
  for (int run = 0; run < num_runs; ++run) {
    std::vector<int64_t> now(size, 1), next(size, 0);
    team.run([&](TeamMember& member) {
      const auto rank = static_cast<size_t>(member.rank());
      for (int round = 0; round < num_rounds; ++round) {
        next[rank] = now[rank] + now[(rank + 1) % size];
        member.barrier();
        now[rank] = next[rank];
        member.barrier();
      }
    });
    for (int64_t value : now)
      if (value != int64_t{1} << num_rounds) return false;
    if (run % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough to park
  }
  return true;
}

bool shares_cover_everything() {
  ThreadTeam team(3);
  std::vector<int> seen(100);
  team.run([&](TeamMember& member) {
    for (int64_t i = member.share_begin(100); i < member.share_end(100); ++i) ++seen[static_cast<size_t>(i)];
  });
  for (int count : seen)
    if (count != 1) return false;
  return true;
}

bool exceptions_reach_the_caller() {
  ThreadTeam team(2);
  bool caught = false;
  try {
    team.run([](TeamMember& member) {
      if (member.rank() == 1) throw std::runtime_error("from a worker");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  int ran = 0;
  team.run([&](TeamMember& member) {  // still usable
    if (member.rank() == 0) ++ran;
  });
  return caught && ran == 1;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
bool too_many_threads_are_refused() { return true; }  // sanitizers reserve more address space than any limit leaves
#else
// With address space for a few stacks only, the threads that did start are joined and the caller is told.
bool too_many_threads_are_refused() {
  rlimit old_limit{};
  getrlimit(RLIMIT_AS, &old_limit);
  rlimit limit = old_limit;
  limit.rlim_cur = rlim_t{512} << 20;
  setrlimit(RLIMIT_AS, &limit);
  bool refused = false;
  try {
    ThreadTeam team(1000);
  } catch (const Error& error) {
    refused = std::string(error.what()).find("could not start 1000 threads") == 0;
  }
  setrlimit(RLIMIT_AS, &old_limit);
  return refused;
}
#endif

}  // namespace

int main() {
  const bool good = ring(1, 20, 20) && ring(2, 500, 20) && ring(5, 60, 20) && shares_cover_everything() &&
                    exceptions_reach_the_caller() && too_many_threads_are_refused();
  std::printf("thread team: %s\n", good ? "ok" : "FAILED");
  return good ? 0 : 1;
}
