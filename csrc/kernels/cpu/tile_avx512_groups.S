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

// ---- 4 bits: groups of 32 k, each 4 lines of codes a vector, then the 16 scales and the 16 minimums of each vector ----
// A line holds, for 16 columns, four codes of k in the low nibbles of a word and the next four in the high ones. The sum
// of a group is an integer. In float32, c += (scale of b * sum + minimum * sum of the row's codes, group by group) * scale
// of a, input group by input group.
// zmm: integer sums, b, a, float32 sums, the mask of low nibbles. r12 r13 r14 r15: pairs of vectors.
// rbp: c. rdx: groups left of the input group. rcx: input groups left. rax: a row's group.

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

// Every vector of b through \action with where it lies, `offset` bytes on, and its register.
.macro each_vector action, vectors, first, offset, kind
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

.macro prefetch_int4_stream kind
  .if \kind == 0
    prefetcht1 [r13]
    add r13, r14
  .endif
.endm

.macro dot_group rows, vectors, end, kind
  .set quad, 0
  .rept 4
    each_vector load_low, \vectors, %(\rows*\vectors), %(quad*128), \kind
    prefetch_int4_stream \kind
    .set a_offset, quad*8
    multiply_rows vpdpbusd, \rows, \vectors, \end
    each_vector load_high, \vectors, %(\rows*\vectors), %(quad*128), \kind
    prefetch_int4_stream \kind
    .set a_offset, quad*8 + 4
    multiply_rows vpdpbusd, \rows, \vectors, \end
    .set a_offset, 0
    .set quad, quad + 1
  .endr
.endm

.macro each_pair action, rows, vectors
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    \action \rows, \vectors, \pair
  .endr
.endm

.macro load_pair rows, vectors, base, index
  .if \vectors > 2*\index
    mov \base, [rax+\index*16]
  .endif
.endm

.macro advance_pair rows, vectors, base, index
  .if \vectors > 2*\index
    add \base, 640
  .endif
.endm

.macro load_halves base, offset, scale, minimum
  vcvtph2ps zmm\scale, ymmword ptr [\base+512+\offset]
  vcvtph2ps zmm\minimum, ymmword ptr [\base+576+\offset]
.endm

.macro next_row rows
  .set row, row + 1
  .if row < \rows
    add rax, rbx
  .endif
.endm

.macro fold_pair rows, vectors, base, index
  .if \vectors > 2*\index
    fold_vector \rows, \vectors, \base, 0, %(2*\index)
    fold_vector \rows, \vectors, \base, 32, %(2*\index + 1)
  .endif
.endm

.macro fold_vector rows, vectors, base, offset, vector
  load_halves \base, \offset, %(\rows*\vectors), %(\rows*\vectors + 1)
  mov rax, r11
  .set row, 0
  .rept \rows
    fold %(row*\vectors + \vector), %(31 - \rows*\vectors + row*\vectors + \vector), %(\rows*\vectors), %(\rows*\vectors + 1)
    next_row \rows
  .endr
.endm

.macro fold integer, sum, scale, minimum
  vcvtdq2ps zmm\integer, zmm\integer
  vfmadd231ps zmm\sum, zmm\integer, zmm\scale
  vfmadd231ps zmm\sum, zmm\minimum, dword ptr [rax+4]{1to16}
.endm

// c += sum * scale of a
.macro add_to_c row, vectors, first
  vbroadcastss zmm0, dword ptr [rax-8]
  .set vector, 0
  .rept \vectors
    add_vector_to_c %(\first + \row*\vectors + vector), %((\row*\vectors + vector)*64)
    .set vector, vector + 1
  .endr
.endm

.macro add_vector_to_c z, offset
  vfmadd213ps zmm\z, zmm0, [rbp+\offset]
  vmovups [rbp+\offset], zmm\z
.endm

// rows*vectors <= 14; kind 0: 2 vectors, whose other pairs' registers have the stream and its step.
.macro int4_groups_tile name, rows, vectors, kind
  .p2align 5
\name:
  save_registers
  set_row_bases \rows
  mov rax, [rsp]
  each_pair load_pair, \rows, \vectors
  .if \kind == 0
    mov r13, [rdi+ARG_PREFETCH]
    mov r14, [rdi+ARG_PREFETCH_STEP]
  .endif
  clear 0
  each_accumulator store_zero, \rows, \vectors
  mov rbp, [rdi+ARG_C]
  mov r11, [rdi+ARG_GROUPS]
  mov rbx, [rdi+ARG_GROUPS_STRIDE]
  mov rcx, [rdi+ARG_NUM_SEGMENTS]
  vpbroadcastd zmm31, dword ptr [rip+steploop_low_nibbles]
1:
  mov rdx, [rdi+ARG_WORDS]
  shr rdx, 3
  clear_from %(31 - \rows*\vectors), %(\rows*\vectors)
  .p2align 5
2:
  clear_from 0, %(\rows*\vectors)
  dot_group \rows, \vectors, %(31 - \rows*\vectors), \kind
  each_pair fold_pair, \rows, \vectors
  each_pair advance_pair, \rows, \vectors
  advance_rows \rows, 32
  add r11, 8
  dec rdx
  jnz 2b
  mov rax, r11
  .set row, 0
  .rept \rows
    add_to_c %row, \vectors, %(31 - \rows*\vectors)
    next_row \rows
  .endr
  dec rcx
  jnz 1b
  restore_registers
.endm

// ---- Every shape ---------------------------------------------------------------------------------------------------

.macro define_int8 name, op, rows, vectors, kind
  .ifnc \name, none
    int8_groups_tile \name, \rows, \vectors, \kind
  .endif
.endm

.macro int4_shape action, rows, vectors, kind
  .if \rows*\vectors > 14 || (\kind == 0 && \vectors > 2)
    \action none, 0, \rows, \vectors, \kind
  .else
    \action int4_\rows\()x\vectors\()_\kind, 0, \rows, \vectors, \kind
  .endif
.endm

.macro define_int4 name, op, rows, vectors, kind
  .ifnc \name, none
    int4_groups_tile \name, \rows, \vectors, \kind
  .endif
.endm

// [kind][vectors 2, 4, 8][rows 1..7]
.macro each_int4 action
  .irp kind, 0, 1
    .irp vectors, 2, 4, 8
      .irp rows, 1, 2, 3, 4, 5, 6, 7
        int4_shape \action, \rows, \vectors, \kind
      .endr
    .endr
  .endr
.endm

  each_dot define_int8, int8_groups, 0
  each_int4 define_int4

  .section .rodata.cst4, "aM", @progbits, 4
  .p2align 2
steploop_low_nibbles:
  .long 0x0f0f0f0f

  .section .data.rel.ro, "aw", @progbits
table steploop_int8_groups_tiles
  each_dot enter, int8_groups, 0
table steploop_int4_groups_tiles
  each_int4 enter

#endif

  .section .note.GNU-stack, "", @progbits
