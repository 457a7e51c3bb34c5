// FairOrder: whose turn it is, and what it costs.
#include "sched/fair_order.h"

#include <algorithm>

#include "core/check.h"

namespace steploop {
namespace {

// Further samples of a request share its prompt.
int64_t start_cost(const Sequence& sequence) { return sequence.is_first_sample ? sequence.num_prompt_tokens : 1; }

}  // namespace

void FairOrder::add(Sequence& sequence) {
  std::unique_ptr<Tenant>& tenant = tenants_[sequence.options.tenant];
  if (!tenant) {
    tenant = std::make_unique<Tenant>();
    ring_.push_back(tenant.get());
  }
  ++tenant->num_unfinished;
  tenant->waiting.push(sequence);
  sequence.tenant = tenant.get();
}

void FairOrder::remove(Sequence& sequence) {
  Tenant& tenant = *sequence.tenant;
  tenant.waiting.remove(sequence);
  if (tenant.waiting.empty()) tenant.balance = std::min<int64_t>(tenant.balance, 0);  // nothing is saved up
}

Sequence* FairOrder::first(const SequenceQueue&) const {
  const Turn turn = next_turn();
  return turn.tenant ? turn.tenant->waiting.first() : nullptr;
}

// Rounds are not run one by one: whoever needs the fewest of them to pay is next, and among equals whoever comes first
// going round from the tenant being served.
FairOrder::Turn FairOrder::next_turn() const {
  Turn next;
  for (size_t i = 0; i < ring_.size(); ++i) {
    const size_t index = (turn_ + i) % ring_.size();
    Tenant& tenant = *ring_[index];
    if (tenant.waiting.empty()) continue;
    const int64_t missing = start_cost(*tenant.waiting.first()) - tenant.balance;
    const int64_t num_rounds = std::max<int64_t>(0, ceil_div(missing, kQuantum));
    if (next.tenant && num_rounds >= next.num_rounds) continue;
    next = {&tenant, index, num_rounds};
  }
  return next;
}

void FairOrder::on_start(Sequence& sequence) {
  const Turn turn = next_turn();
  if (turn.tenant == sequence.tenant) {  // else it goes first because others passed it too often
    for (Tenant* tenant : ring_)
      if (!tenant->waiting.empty()) tenant->balance += turn.num_rounds * kQuantum;
    turn_ = turn.index;
  }
  sequence.tenant->balance -= start_cost(sequence);
}

void FairOrder::on_end(Sequence& sequence) {
  if (--sequence.tenant->num_unfinished > 0) return;
  const auto gone = std::find(ring_.begin(), ring_.end(), sequence.tenant) - ring_.begin();
  ring_.erase(ring_.begin() + gone);
  if (static_cast<size_t>(gone) < turn_) --turn_;
  if (turn_ >= ring_.size()) turn_ = 0;
  tenants_.erase(sequence.options.tenant);
}

}  // namespace steploop
