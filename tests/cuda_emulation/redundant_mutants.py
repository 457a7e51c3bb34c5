"""The mutants that no check can notice, each with the reason: what they leave out is not needed for right results.

By file and reason: kinds of mutants and their lines, as Mutant.change has them.
"""

from __future__ import annotations

_BY_REASON: dict[str, dict[str, list[tuple[str, str]]]] = {
    "attention_warp.cuh": {
        "work on a tile that lies after all of the warp's rows changes nothing; the condition saves it": [
            (
                "mask",
                "[first_row < rows_ -> true] ? item_.first_position + args.token_of(min(first_row + kWarpRows, "
                "rows_) - 1) + 1 : 0;",
            ),
            (
                "mask",
                "first_row < rows_ ? item_.first_position + args.token_of([min(first_row + kWarpRows, rows_) -> "
                "(first_row + kWarpRows)] - 1) + 1 : 0;",
            ),
            (
                "mask",
                "first_row < rows_ ? item_.first_position + args.token_of([min(first_row + kWarpRows, rows_) -> "
                "(rows_)] - 1) + 1 : 0;",
            ),
            (
                "index",
                "first_row < rows_ ? item_.first_position + args.token_of([min(first_row + kWarpRows, rows_) - 1 -> "
                "(min(first_row + kWarpRows, rows_) - 1) + 1]) + 1 : 0;",
            ),
            ("mask", "if ([active -> true]) scores(keys, s);"),
            ("mask", "if ([active -> true]) {"),
        ],
        "what lies after the last position is masked in every row": [
            ("index", "end_ = [last_position_ + 1 -> (last_position_ + 1) + 1];"),
            (
                "mask",
                "if (item_.num_splits > 0) end_ = [min(end_, position + item_.num_splits * kAttentionSplit) -> "
                "(position + item_.num_splits * kAttentionSplit)];",
            ),
        ],
        "after the last tile, zeros are copied that nobody reads": [
            ("mask", "const bool more = [next < end_ -> true];"),
            ("mask", "if ([more -> true]) load_tile<true, true>(next, stage ^ 1);"),
            ("mask", "if ([more -> true]) load_tile<true, false>(next, 0);"),
        ],
        "after the last tile there is nothing to wait for": [
            ("mask", "if ([more -> true]) finish_copies();"),
        ],
        "a multiple of 8 that is divided by 8": [
            (
                "index",
                "const int in_block = [position & ((1 << args_.block_shift) - 1) -> (position & ((1 << "
                "args_.block_shift) - 1)) + 1];",
            ),
        ],
        "scores of these keys are replaced by -inf; the condition saves reading them": [
            ("mask", "if constexpr (kCopyKeys) cp_async_16(to, keys + j * kRowBytes, [row <= last_row -> true]);"),
        ],
        "nothing is read there; the condition keeps the address inside the queries, as cp.async wants it": [
            (
                "mask",
                "[valid -> true] ? q + args_.head_index(item_.query_row, item_.kv_head, row) * kRowBytes + lane_ % "
                "kRowCopies * 16 : q;",
            ),
        ],
        "what the rows after the last hold concerns no other row, and nobody writes their results": [
            ("mask", "cp_async_16(own_ + lane_place() + i * kStride, from, [valid -> true]);"),
        ],
        "no score of such a tile is masked; the condition saves comparing": [
            ("mask", "if ([tile + kAttentionTile - 1 > first_position_ -> true]) {"),
        ],
        "the four lanes of a row hold the same maximum and sum": [
            ("shuffle", "if ([lane_ % 4 -> (lane_ ^ 1) % 4] == 0)"),
        ],
        "emulation cannot tell: its products wait for all lanes, a GPU's need lanes that have not parted": [
            ("barrier", "} [__syncwarp() -> /* __syncwarp() */]; float s[kKeys][4] = {};"),
        ],
    },
    "gemm.cuh": {
        "both operands take the other half of each 16 of k: the same products, summed in another order": [
            ("index", "const int chunk = [2 * step -> (2 * step) + 1];"),
        ],
        "nothing is read there; the condition keeps the address inside the operand, as cp.async wants it": [
            ("mask", "([k_left_ > 0 -> true] ? chunk_ * 8 : 0);"),
            (
                "mask",
                "row_offsets_[i] = [rows_ > i * kRowStep -> true] ? static_cast<uint32_t>(row_ + i * kRowStep) * "
                "depth : 0;",
            ),
        ],
        "what is read then goes unused; the condition saves reading it": [
            ("mask", "const float2 old = [add -> true] ? *reinterpret_cast<const float2*>(out) : make_float2(0, 0);"),
        ],
        "old is 0 then": [
            (
                "mask",
                "*reinterpret_cast<float2*>(out) = [add -> true] ? make_float2(old.x + first, old.y + second) : "
                "make_float2(first, second);",
            ),
        ],
        "past the end of k copies bring zeros; the condition saves bringing and adding them": [
            (
                "index",
                "const int num_blocks = [(p.in_features - 1) / kDepth + 1 -> ((p.in_features - 1) / kDepth + 1) + 1];",
            ),
            ("mask", "if ([stage < num_blocks -> true]) {"),
            ("mask", "const bool copies_left = [block + kStages - 1 < num_blocks -> true];"),
            ("mask", "if ([copies_left -> true]) {"),
        ],
        "the steps that follow copy the same again": [
            (
                "mask",
                "for (int i = first; i < [std::min(kCopies, first + kCopiesPerStep) -> (kCopies)]; ++i) "
                "copy(free_stage, i);",
            ),
        ],
        "after the last block, fragments are loaded that nobody multiplies": [
            ("mask", "if ([block + 1 < num_blocks -> true]) {"),
        ],
    },
    "rope_kv_write.cu": {
        "the shift is a faster division by the same number": [
            ("mask", "const int64_t block = [block_shift >= 0 -> false] ? slot >> block_shift : slot / kv.block_size;"),
        ],
        "queries have no use for the slot; the condition saves reading it": [
            ("mask", "if ([!is_query -> true]) slot = p.slot_mapping[token];"),
        ],
        "values have no use for the angle; the condition saves reading it": [
            ("mask", "if (active && [!is_value -> true]) {"),
        ],
    },
    "sample.cu": {
        "a draw among the first one gives the same token; the condition saves it": [
            ("mask", "const bool greedy = params_.scale == 0 || [params_.top_k == 1 -> false];"),
        ],
        "nobody reads what is cleared then": [
            ("mask", "if ([!greedy -> true]) clear_shared();"),
        ],
        "candidates come from the row then; those in shared memory are the same, but faster": [
            ("mask", "if ([num_gathered_ >= 0 -> false]) {"),
        ],
        "what lies below lowest_ lies past the end of every prefix looked for; the condition saves adding it": [
            ("mask", "if ([candidate.logit >= lowest_ -> true]) visit(candidate.logit, candidate.token);"),
            ("mask", "if ([x[j] >= lowest_ -> true]) visit(x[j], token_of(chunk, j));"),
        ],
        "without masked tokens nothing is masked; the condition saves a barrier": [
            ("mask", "if ([params_.num_masked == 0 -> false]) return;"),
        ],
        "only thread 0's result is used; the condition saves the others the work": [
            ("mask", "if ([this_thread() != 0 -> false]) return 0;"),
        ],
        "top_k 0 becomes 0 either way": [
            ("mask", "const int top_k = [params_.top_k > 0 -> true] && params_.top_k < size_ ? params_.top_k : 0;"),
        ],
        "top_p 1 keeps all that top_k has kept; the condition saves looking for its end": [
            ("mask", "if ([params_.top_p < 1 -> true]) {"),
        ],
        "any lower bound will do: a lower one only leaves more candidates": [
            (
                "mask",
                "const float distance = 0.01f + logf(kUnits / static_cast<float>([units < 1 -> false] ? 1 : units));",
            ),
            (
                "mask",
                "const float distance = 0.01f + logf(kUnits / static_cast<float>([units < 1 -> true] ? 1 : units));",
            ),
        ],
        "a lane without candidates adds none; the condition saves the atomic": [
            ("mask", "if ([count == 0 -> false] || full) return;"),
        ],
        "once there are too many, the count may go on growing": [
            ("mask", "if (count == 0 || [full -> false]) return;"),
        ],
        "of the other chunks no rank begins with the digits so far; the condition saves reading them": [
            (
                "mask",
                "for_each_candidate(first_chunk, [one_chunk -> false] ? first_chunk + 1 : num_chunks(), [&](float "
                "logit, int token) {",
            ),
        ],
    },
    "sample.cuh": {
        "a share of at most 1 - 2^-53 of a rounded total rounds to the total at most": [
            ("mask", "return [amount < total -> true] ? amount : total;"),
        ],
        "adding 0 changes nothing; the condition saves the atomic": [
            ("mask", "if ([high != 0 -> true]) atomicAdd(&histogram.high[bin], high);"),
        ],
    },
    "silu_mul.cu": {
        "the shift is a faster division by the same number": [
            ("mask", "const int32_t run = [group_shift >= 0 -> false] ? column >> group_shift : column / p.group;"),
        ],
        "the next line refuses it too: a group is a multiple of 8 and divides the size": [
            ("mask", "if (p.num_rows < 0 || p.size < 0 || [p.size % 8 != 0 -> false]) return cudaErrorInvalidValue;"),
        ],
    },
}

# By file, kind and change.
REDUNDANT = {
    (file, kind, change): reason
    for file, reasons in _BY_REASON.items()
    for reason, changes in reasons.items()
    for kind, change in changes
}
