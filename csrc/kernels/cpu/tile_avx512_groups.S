// Tiles of quantised weights: each group's sum is an integer, and scales bring the sums together in float32.

#if defined(__x86_64__)

#include "kernels/cpu/tile_avx512.inc"

// ---- 8 bits in groups of k: words, then the 16 scales of each vector -------------------------------------------------------
// The sum of a group is an integer that begins with the row's term; c, in memory, += scale of b * sum * scale of a.

.macro store_zero z, offset
  vmovups [rax+\offset], zmm0
.endm

.macro begin_sums row, vectors
  begin_sum %(\row*\vectors)
  .set vector, 1
  .rept \vectors-1
    copy_sum %(\row*\vectors + vector), %(\row*\vectors)
    .set vector, vector + 1
  .endr
.endm

.macro begin_sum z
  vpbroadcastd zmm\z, dword ptr [rdx+4]
.endm

.macro copy_sum z, from
  vmovdqa64 zmm\z, zmm\from
.endm

// A line of the stream for each of four words; rdx from a line to the next.
.macro prefetch_stream_of_word word, kind
  .if \kind == 0
    .if \word % 2
      prefetcht1 [rbp+rdx]
      lea rbp, [rbp+2*rdx]
    .else
      prefetcht1 [rbp]
    .endif
  .endif
.endm

.macro int8_groups_word word, rows, vectors, kind
  load_b_vectors \vectors, %(\rows*\vectors), \kind, %(\word*128), none
  prefetch_stream_of_word \word, \kind
  .set a_offset, \word*4
  multiply_rows vpdpbusd, \rows, \vectors
  .set a_offset, 0
.endm

.macro advance_b_pointers vectors, bytes
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    advance_b_pointer \vectors, \bytes, \pair
  .endr
.endm

.macro advance_b_pointer vectors, bytes, base, index
  .if \vectors > \index
    add \base, \bytes
  .endif
.endm

.macro fold_row row, vectors, scales, a_scale
  vbroadcastss zmm\a_scale, dword ptr [rdx]
  .set vector, 0
  .rept \vectors
    fold_into_c %(\row*\vectors + vector), %(\scales + vector), \a_scale, %((\row*\vectors + vector)*64)
    .set vector, vector + 1
  .endr
.endm

.macro fold_into_c z, scale, a_scale, offset
  vcvtdq2ps zmm\z, zmm\z
  vmulps zmm\z, zmm\z, zmm\scale
  vfmadd213ps zmm\z, zmm\a_scale, [rax+\offset]
  vmovups [rax+\offset], zmm\z
.endm

.macro int8_groups_tile name, rows, vectors, kind
  .p2align 5
\name:
  save_registers
  set_row_bases \rows
  load_b_pointers \vectors
  clear 0
  each_accumulator store_zero, \rows, \vectors
  mov rbp, [rdi+ARG_PREFETCH]
  mov rcx, [rdi+ARG_NUM_SEGMENTS]
  mov rax, [rdi+ARG_GROUPS]
  mov [rsp], rax  // row 0's, of the group in progress
1:
  mov rdx, [rsp]
  .set row_of_group, 0
  .rept \rows
    begin_sums %row_of_group, \vectors
    add rdx, [rdi+ARG_GROUPS_STRIDE]
    .set row_of_group, row_of_group + 1
  .endr
  mov rdx, [rdi+ARG_PREFETCH_STEP]
  mov rax, [rdi+ARG_WORDS]
  shr rax, 2
  .p2align 5
2:
  .irp word, 0, 1, 2, 3
    int8_groups_word \word, \rows, \vectors, \kind
  .endr
  advance_b_pointers \vectors, 512
  advance_rows \rows, 16
  dec rax
  jnz 2b
  load_b_vectors \vectors, %(\rows*\vectors), \kind, 0, 128  // the scales
  mov rax, [rdi+ARG_C]
  mov rdx, [rsp]
  .set row_of_group, 0
  .rept \rows
    fold_row %row_of_group, \vectors, %(\rows*\vectors), %(\rows*\vectors + \vectors)
    add rdx, [rdi+ARG_GROUPS_STRIDE]
    .set row_of_group, row_of_group + 1
  .endr
  add qword ptr [rsp], 8
  dec rcx
  jnz 1b
  restore_registers
.endm

// ---- 4 bits in groups of 32 k ------------------------------------------------------------------------------------------
// The sum of a group is an integer; it begins with the bits of 1.5 * 2^23, so that it is that float32 plus the sum, and a
// single multiply-add takes it times the scale of b, less 1.5 * 2^23 times the scale: exact but for the one rounding. In
// float32, c += minimum of b * sum of the row's values, and then c += that product * scale of a.
// zmm: integer sums, float32 sums, b, a. r12 r13 r14 r15: pairs of vectors. rbp: the stream, rdx: its step. rcx: groups
// left. r11: row 0's group, rax: a row's.

// Every vector of b through \action with where it lies, `offset` bytes on, and its register.
.macro each_vector action, vectors, first, offset, kind=0
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    each_of_pair \action, \vectors, \first, \offset, \kind, \pair
  .endr
.endm

.macro each_of_pair action, vectors, first, offset, kind, base, index
  .if \vectors > 2*\index
    \action \base, %(\offset), %(\first + 2*\index), \kind
    \action \base, %(\offset + 64), %(\first + 2*\index + 1), \kind
  .endif
.endm

.macro each_pair action, rows, vectors
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    one_pair \action, \rows, \vectors, \pair
  .endr
.endm

.macro one_pair action, rows, vectors, base, index
  .if \vectors > 2*\index
    \action \rows, \vectors, \base, \index
  .endif
.endm

.macro load_pair rows, vectors, base, index
  mov \base, [rax+\index*16]
.endm

.macro begin_int4 rows, vectors
  save_registers
  set_row_bases \rows
  mov rax, [rsp]
  each_pair load_pair, \rows, \vectors
  mov r11, [rdi+ARG_GROUPS]
  mov rbx, [rdi+ARG_GROUPS_STRIDE]
  mov rcx, [rdi+ARG_NUM_SEGMENTS]
  mov rbp, [rdi+ARG_PREFETCH]
  mov rdx, [rdi+ARG_PREFETCH_STEP]
  clear_from %(\rows*\vectors), %(\rows*\vectors)
.endm

.macro next_int4_group rows
  advance_rows \rows, 32
  add r11, 8
  dec rcx
.endm

.macro start_sums rows, vectors
  vpbroadcastd zmm0, dword ptr [rip+steploop_start]
  .set cell, 1
  .rept \rows*\vectors-1
    copy_sum %cell, 0
    .set cell, cell + 1
  .endr
.endm

.macro dot_word rows, vectors, word, end
  .set a_offset, \word*4
  multiply_rows vpdpbusd, \rows, \vectors, \end, %(2*\rows*\vectors)
  .set a_offset, 0
.endm

.macro next_row rows
  .set row, row + 1
  .if row < \rows
    add rax, rbx
  .endif
.endm

.macro prefetch_int4_stream kind
  .if \kind == 0
    prefetcht1 [rbp]
    add rbp, rdx
  .endif
.endm

// Every float32 sum through \action with its place in c.
.macro each_sum action, rows, vectors
  mov rax, [rdi+ARG_C]
  .set cell, 0
  .rept \rows*\vectors
    \action %(\rows*\vectors + cell), %(cell*64)
    .set cell, cell + 1
  .endr
.endm

// ---- As they are packed, for few rows: each group 4 lines of codes a vector, then the 16 scales and the 16 minimums ----
// A line holds, for 16 columns, four codes of k in the low nibbles of a word and the next four in the high ones.
// zmm31: the mask of low nibbles.

.macro load_low base, offset, z, kind
  vpandd zmm\z, zmm31, [\base+\offset]
  .if \kind == 1
    prefetcht0 [\base+\offset+3072]
  .endif
.endm

.macro load_high base, offset, z, kind
  vpsrld zmm\z, [\base+\offset], 4
  vpandd zmm\z, zmm\z, zmm31
.endm

.macro fold_pair rows, vectors, base, index
  load_halves \base, %(2*\rows*\vectors), %(2*\rows*\vectors + 1), %(2*\rows*\vectors + 2), %(2*\rows*\vectors + 3)
  minus_start %(2*\rows*\vectors + 4), %(2*\rows*\vectors)
  minus_start %(2*\rows*\vectors + 5), %(2*\rows*\vectors + 1)
  mov rax, r11
  .set row, 0
  .rept \rows
    load_group %(2*\rows*\vectors + 6), %(2*\rows*\vectors + 7)
    fold_row_of_pair %(row*\vectors + 2*\index), %(\rows*\vectors), %(2*\rows*\vectors)
    next_row \rows
  .endr
  add \base, 640
.endm

.macro load_halves base, scale, next_scale, minimum, next_minimum
  vcvtph2ps zmm\scale, ymmword ptr [\base+512]
  vcvtph2ps zmm\next_scale, ymmword ptr [\base+544]
  vcvtph2ps zmm\minimum, ymmword ptr [\base+576]
  vcvtph2ps zmm\next_minimum, ymmword ptr [\base+608]
.endm

.macro minus_start z, scale
  vmulps zmm\z, zmm\scale, dword ptr [rip+steploop_minus_start]{1to16}
.endm

.macro fold_row_of_pair sum, floats, first
  fold %(\sum), %(\sum + \floats), %(\first), %(\first + 2), %(\first + 4), %(\first + 6), %(\first + 7)
  fold %(\sum + 1), %(\sum + 1 + \floats), %(\first + 1), %(\first + 3), %(\first + 5), %(\first + 6), %(\first + 7)
.endm

.macro fold integer, sum, scale, minimum, start, row_term, row_scale
  vfmadd213ps zmm\integer, zmm\scale, zmm\start
  vfmadd231ps zmm\sum, zmm\minimum, zmm\row_term
  vfmadd231ps zmm\sum, zmm\integer, zmm\row_scale
.endm

// rows*vectors <= 11
.macro int4_groups_tile name, rows, vectors, kind
  .p2align 5
\name:
  begin_int4 \rows, \vectors
  vpbroadcastd zmm31, dword ptr [rip+steploop_low_nibbles]
  .p2align 5
1:
  start_sums \rows, \vectors
  .irp quad, 0, 1, 2, 3
    each_vector load_low, \vectors, %(2*\rows*\vectors), %(\quad*128), \kind
    prefetch_int4_stream \kind
    dot_word \rows, \vectors, %(2*\quad), 31
    each_vector load_high, \vectors, %(2*\rows*\vectors), %(\quad*128)
    prefetch_int4_stream \kind
    dot_word \rows, \vectors, %(2*\quad + 1), 31
  .endr
  each_pair fold_pair, \rows, \vectors
  next_int4_group \rows
  jnz 1b
  each_sum store_c, \rows, \vectors
  restore_registers
.endm

// ---- As unpack_int4 leaves them, for many rows: 8 lines a vector, the 16 scales, the 16 minimums ----------------
// More than the arithmetic, loads and stores of 512 bits hold such tiles back: sums stay in registers, and b and a take
// 7 loads for 12 products.

.macro load_unpacked base, offset, z, kind=0
  vmovaps zmm\z, [\base+\offset]
.endm

.macro fold_unpacked rows, vectors, first
  load_constant %(\first + 2)
  .irp pair, <r12,0>, <r13,1>
    both_of_pair scale_vector, \rows, \vectors, \first, 1024, \pair
  .endr
  mov rax, r11
  .set row, 0
  .rept \rows
    load_group %(\first + 1 + row), %(\first + 1 + \rows + row)
    next_row \rows
  .endr
  .irp pair, <r12,0>, <r13,1>
    both_of_pair fold_unpacked_vector, \rows, \vectors, \first, 1152, \pair
    advance_unpacked \vectors, \pair
  .endr
.endm

.macro load_constant z
  vpbroadcastd zmm\z, dword ptr [rip+steploop_minus_start]
.endm

.macro advance_unpacked vectors, base, index
  .if \vectors > 2*\index
    add \base, 1280
  .endif
.endm

.macro both_of_pair action, rows, vectors, first, offset, base, index
  .if \vectors > 2*\index
    \action \rows, \vectors, \first, \base, %(\offset), %(2*\index)
    \action \rows, \vectors, \first, \base, %(\offset + 64), %(2*\index + 1)
  .endif
.endm

.macro load_group term, scale
  vbroadcastss zmm\term, dword ptr [rax+4]
  vbroadcastss zmm\scale, dword ptr [rax]
.endm

.macro scale_vector rows, vectors, first, base, offset, vector
  load_scale %(\first), %(\first + 1), %(\first + 2), \base, \offset
  .set row, 0
  .rept \rows
    scale_sum %(row*\vectors + \vector), %(\first), %(\first + 1)
    .set row, row + 1
  .endr
.endm

.macro load_scale scale, start, minus_start, base, offset
  vmovaps zmm\scale, [\base+\offset]
  vmulps zmm\start, zmm\scale, zmm\minus_start
.endm

.macro fold_unpacked_vector rows, vectors, first, base, offset, vector
  load_unpacked \base, \offset, \first
  .set row, 0
  .rept \rows
    fold_unpacked_sum %(row*\vectors + \vector), %(\rows*\vectors + row*\vectors + \vector), \first, %(\first + 1 + row), %(\first + 1 + \rows + row)
    .set row, row + 1
  .endr
.endm

.macro scale_sum z, scale, start
  vfmadd213ps zmm\z, zmm\scale, zmm\start
.endm

.macro fold_unpacked_sum integer, sum, minimum, row_term, row_scale
  vfmadd231ps zmm\sum, zmm\minimum, zmm\row_term
  vfmadd231ps zmm\sum, zmm\integer, zmm\row_scale
.endm

.macro prefetch_unpacked_stream word
  .if \word % 2
    prefetch_int4_stream 0
  .endif
.endm

// rows <= 3
.macro int4_unpacked_tile name, rows, vectors, kind
  .p2align 5
\name:
  begin_int4 \rows, \vectors
  cmp byte ptr [rdi+ARG_ACCUMULATE], 0
  je 1f
  each_sum load_c, \rows, \vectors
  .p2align 5
1:
  start_sums \rows, \vectors
  .irp word, 0, 1, 2, 3, 4, 5, 6, 7
    each_vector load_unpacked, \vectors, %(2*\rows*\vectors), %(\word*128)
    prefetch_unpacked_stream \word
    dot_word \rows, \vectors, \word, 32
  .endr
  fold_unpacked \rows, \vectors, %(2*\rows*\vectors)
  next_int4_group \rows
  jnz 1b
  each_sum store_c, \rows, \vectors
  restore_registers
.endm

// ---- Every shape ---------------------------------------------------------------------------------------------------

.macro define_int8 name, op, rows, vectors, kind
  .ifnc \name, none
    int8_groups_tile \name, \rows, \vectors, \kind
  .endif
.endm

// Packed: [vectors 2, 4, 8][rows 1..5]
.macro each_int4_groups action
  .irp kind, 0, 1
    .irp vectors, 2, 4, 8
      .irp rows, 1, 2, 3, 4, 5
        int4_groups_shape \action, \rows, \vectors, \kind
      .endr
    .endr
  .endr
.endm

.macro int4_groups_shape action, rows, vectors, kind
  .if \rows*\vectors > 11
    \action none, int4_groups_tile, \rows, \vectors, \kind
  .else
    \action int4_groups_\rows\()x\vectors\()_\kind, int4_groups_tile, \rows, \vectors, \kind
  .endif
.endm

// Unpacked: [vectors 2, 4][rows 1..3]
.macro each_int4_unpacked action
  .irp vectors, 2, 4
    .irp rows, 1, 2, 3
      int4_unpacked_shape \action, \rows, \vectors
    .endr
  .endr
.endm

.macro int4_unpacked_shape action, rows, vectors
  \action int4_unpacked_\rows\()x\vectors, int4_unpacked_tile, \rows, \vectors, 0
.endm

.macro define_int4 name, tile, rows, vectors, kind
  .ifnc \name, none
    \tile \name, \rows, \vectors, \kind
  .endif
.endm

  each_dot define_int8, int8_groups, 0
  each_int4_groups define_int4
  each_int4_unpacked define_int4

  .section .rodata.cst4, "aM", @progbits, 4
  .p2align 2
steploop_low_nibbles:
  .long 0x0f0f0f0f
steploop_start:
  .long 0x4b400000
steploop_minus_start:
  .long 0xcb400000

  .section .data.rel.ro, "aw", @progbits
table steploop_int8_groups_tiles
  each_dot enter, int8_groups, 0
table steploop_int4_groups_tiles
  each_int4_groups enter
table steploop_int4_unpacked_tiles
  each_int4_unpacked enter

#endif

  .section .note.GNU-stack, "", @progbits
