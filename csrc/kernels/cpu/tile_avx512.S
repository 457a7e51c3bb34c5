// Tiles without groups: float32, bfloat16, 8 bits, and bfloat16 that is widened.

#if defined(__x86_64__)

#include "kernels/cpu/tile_avx512.inc"

// kind 0: the prefetch stream, a step a word, to L2; 1: b itself, 3 KiB ahead, to L1.
.macro dot_tile name, op, rows, vectors, kind
  .p2align 5
\name:
  save_registers
  cmp byte ptr [rdi+ARG_ACCUMULATE], 0
  je 1f
  each_accumulator load_c, \rows, \vectors
  jmp 2f
1:
  clear_from 0, %(\rows*\vectors)
2:
  set_row_bases \rows
  mov rdx, [rdi+ARG_B_STRIDE]
  mov rcx, [rdi+ARG_NUM_SEGMENTS]
  mov rbp, [rdi+ARG_PREFETCH]
3:
  load_b_pointers \vectors
  mov rax, [rdi+ARG_WORDS]
  .p2align 5
4:
  load_b_vectors \vectors, %(\rows*\vectors), \kind
  prefetch_stream \kind
  multiply_rows \op, \rows, \vectors
  advance_rows \rows, 4
  dec rax
  jnz 4b
  dec rcx
  jnz 3b
  each_accumulator store_c, \rows, \vectors
  restore_registers
.endm

// ---- Rows of float32 by bfloat16: b's pairs are widened, the low numbers and then the high ones ----------------------
// zmm: accumulators, low numbers of b, high ones, a.

.macro splat_next address, z
  vpbroadcastd zmm\z, dword ptr [\address+4]
.endm

.macro widen low, high
  vpandd zmm\high, zmm\low, dword ptr [rip+steploop_high_half]{1to16}
  vpslld zmm\low, zmm\low, 16
.endm

.macro multiply_widened rows, vectors, which, splat_macro, b
  .set row, 0
  .rept \rows
    .set a_register, \rows*\vectors + 2*\vectors + (2*row + \which) % (32 - \rows*\vectors - 2*\vectors)
    with_row_address \splat_macro, %row, %a_register
    .set vector, 0
    .rept \vectors
      multiply vfmadd231ps, %(row*\vectors + vector), %(\b + vector), %a_register
      .set vector, vector + 1
    .endr
    .set row, row + 1
  .endr
.endm

.macro widened_tile name, rows, vectors, kind
  .p2align 5
\name:
  save_registers
  clear_from 0, %(\rows*\vectors)
  set_row_bases \rows
  mov rdx, [rdi+ARG_B_STRIDE]
  mov rbp, [rdi+ARG_PREFETCH]
  load_b_pointers \vectors
  mov rcx, [rdi+ARG_WORDS]
  .p2align 5
1:
  load_b_vectors \vectors, %(\rows*\vectors), \kind
  .set vector, 0
  .rept \vectors
    widen %(\rows*\vectors + vector), %(\rows*\vectors + \vectors + vector)
    .set vector, vector + 1
  .endr
  prefetch_stream \kind
  multiply_widened \rows, \vectors, 0, splat, %(\rows*\vectors)
  multiply_widened \rows, \vectors, 1, splat_next, %(\rows*\vectors + \vectors)
  advance_rows \rows, 8
  dec rcx
  jnz 1b
  each_accumulator store_c, \rows, \vectors
  restore_registers
.endm

// ---- Every shape ---------------------------------------------------------------------------------------------------

.macro define_dot name, op, rows, vectors, kind
  .ifnc \name, none
    dot_tile \name, \op, \rows, \vectors, \kind
  .endif
.endm

.macro define_widened name, op, rows, vectors, kind
  .ifnc \name, none
    widened_tile \name, \rows, \vectors, \kind
  .endif
.endm

  each_dot define_dot, float32, vfmadd231ps
  each_dot define_dot, bfloat16, vdpbf16ps
  each_dot define_dot, int8, vpdpbusd
  each_dot define_widened, widened, 0, 2

  .section .rodata.cst4, "aM", @progbits, 4
  .p2align 2
steploop_high_half:
  .long 0xffff0000

  .section .data.rel.ro, "aw", @progbits
table steploop_float32_tiles
  each_dot enter, float32, 0
table steploop_bfloat16_tiles
  each_dot enter, bfloat16, 0
table steploop_int8_tiles
  each_dot enter, int8, 0
table steploop_widened_tiles
  each_dot enter, widened, 0, 2

#endif

  .section .note.GNU-stack, "", @progbits
