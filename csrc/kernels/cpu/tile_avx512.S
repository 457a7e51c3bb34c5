// The micro-kernels of tile.h for AVX-512: whole loops over k with registers assigned by hand, because GCC 12 spills
// accumulators of tall tiles, which costs 15% of the peak. One macro an algorithm, expanded for every shape; the tables
// at the end are what tile.h calls through. Arguments: TileArgs in rdi; its offsets are asserted there.

#if defined(__x86_64__)

  .intel_syntax noprefix
  .altmacro
  .text

#define ARG_A 0
#define ARG_A_STRIDE 8
#define ARG_B 16
#define ARG_B_STRIDE 24
#define ARG_NUM_SEGMENTS 32
#define ARG_WORDS 40
#define ARG_C 48
#define ARG_C_STRIDE 56
#define ARG_ACCUMULATE 64
#define ARG_PREFETCH 72
#define ARG_PREFETCH_STEP 80
#define ARG_GROUPS 88
#define ARG_GROUPS_STRIDE 96

// Registers: a's rows in threes, base + 0, 1, 2 strides: r8 r9 r10 r11 rbx, stride rsi. b's vectors: r12 r13 r14 r15,
// stride rdx (eight vectors are four pairs, each pair one pointer). rbp: the stream to prefetch. rax: words left.
// rcx: segments left. zmm: accumulators first, row by row; then b; then a.

.macro with_row_address macro_name, row, z
  .if \row < 3
    with_address \macro_name, r8, \row, \z
  .elseif \row < 6
    with_address \macro_name, r9, %(\row - 3), \z
  .elseif \row < 9
    with_address \macro_name, r10, %(\row - 6), \z
  .elseif \row < 12
    with_address \macro_name, r11, %(\row - 9), \z
  .else
    with_address \macro_name, rbx, %(\row - 12), \z
  .endif
.endm

.macro with_address macro_name, base, strides, z
  .if \strides == 0
    \macro_name \base, \z
  .elseif \strides == 1
    \macro_name \base+rsi, \z
  .else
    \macro_name \base+2*rsi, \z
  .endif
.endm

.set a_offset, 0  // bytes from where a's registers point; other words of an unrolled loop set it
.macro splat address, z
  vpbroadcastd zmm\z, dword ptr [\address+a_offset]
.endm

.macro clear z
  vpxord zmm\z, zmm\z, zmm\z
.endm

.macro load_b z, base, offset, kind
  vmovdqu64 zmm\z, [\base+\offset]
  .if \kind == 1
    prefetcht0 [\base+\offset+3072]
  .endif
.endm

.macro multiply op, c, b, a
  \op zmm\c, zmm\b, zmm\a
.endm

.macro clear_from first, count
  .set index, \first
  .rept \count
    clear %index
    .set index, index + 1
  .endr
.endm

.macro load_c z, offset
  vmovups zmm\z, [rax+\offset]
.endm

.macro store_c z, offset
  vmovups [rax+\offset], zmm\z
.endm

// Every accumulator through \action with rax at its row of c and the byte offset in it.
.macro each_accumulator action, rows, vectors
  mov rax, [rdi+ARG_C]
  mov rcx, [rdi+ARG_C_STRIDE]
  .set row, 0
  .rept \rows
    .set vector, 0
    .rept \vectors
      \action %(row * \vectors + vector), %(vector * 64)
      .set vector, vector + 1
    .endr
    .set row, row + 1
    .if row < \rows
      lea rax, [rax+rcx*4]
    .endif
  .endr
.endm

.macro save_registers
  push rbx
  push rbp
  push r12
  push r13
  push r14
  push r15
  push qword ptr [rdi+ARG_B]  // where the next segment's pointers are
.endm

.macro restore_registers
  pop rax
  pop r15
  pop r14
  pop r13
  pop r12
  pop rbp
  pop rbx
  vzeroupper
  ret
.endm

.macro set_row_bases rows
  mov r8, [rdi+ARG_A]
  mov rsi, [rdi+ARG_A_STRIDE]
  lea rax, [rsi+2*rsi]
  .irp pair, <r9,r8,3>, <r10,r9,6>, <r11,r10,9>, <rbx,r11,12>
    next_base \rows, \pair
  .endr
.endm

.macro next_base rows, base, previous, first
  .if \rows > \first
    lea \base, [\previous+rax]
  .endif
.endm

.macro advance_rows rows, bytes
  .irp pair, <r8,0>, <r9,3>, <r10,6>, <r11,9>, <rbx,12>
    advance_base \rows, \bytes, \pair
  .endr
.endm

.macro advance_base rows, bytes, base, first
  .if \rows > \first
    add \base, \bytes
  .endif
.endm

// The pointers of a segment, or of a pair of vectors each when there are eight.
.macro load_b_pointers vectors
  mov rax, [rsp]
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    load_b_pointer \vectors, \pair
  .endr
  add qword ptr [rsp], \vectors*8
.endm

.macro load_b_pointer vectors, base, index
  .if \vectors == 8
    mov \base, [rax+\index*16]
  .elseif \vectors > \index
    mov \base, [rax+\index*8]
  .endif
.endm

// advance: what is added to the pointers, "none" for nothing.
.macro load_b_vectors vectors, first, kind, offset=0, advance=rdx
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    load_b_vector \vectors, \first, \kind, \pair, \offset, \advance
  .endr
.endm

.macro load_b_vector vectors, first, kind, base, index, offset=0, advance=rdx
  .if \vectors == 8
    load_b %(\first + 2*\index), \base, %(\offset), \kind
    load_b %(\first + 2*\index + 1), \base, %(\offset + 64), \kind
    advance_b \base, \advance
  .elseif \vectors > \index
    load_b %(\first + \index), \base, %(\offset), \kind
    advance_b \base, \advance
  .endif
.endm

.macro advance_b base, bytes
  .ifnc \bytes, none
    add \base, \bytes
  .endif
.endm

.macro prefetch_stream kind
  .if \kind == 0
    prefetcht1 [rbp]
    add rbp, [rdi+ARG_PREFETCH_STEP]
  .endif
.endm

// The products of a word of each row with those of b.
.macro multiply_rows op, rows, vectors
  .set row, 0
  .rept \rows
    // The registers left over hold a's words in turn.
    .set a_register, \rows*\vectors + \vectors + row % (32 - \rows*\vectors - \vectors)
    with_row_address splat, %row, %a_register
    .set vector, 0
    .rept \vectors
      multiply \op, %(row*\vectors + vector), %(\rows*\vectors + vector), %a_register
      .set vector, vector + 1
    .endr
    .set row, row + 1
  .endr
.endm

// kind 0: one line of the prefetch stream a word, to L2; 1: b itself, 3 KiB ahead, to L1.
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

// ---- 8 bits in groups of 64 k: 16 words, then the 16 scales of each vector --------------------------------------------
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
  mov rcx, [rdi+ARG_WORDS]
  shr rcx, 4
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
  mov eax, 4
  .p2align 5
2:
  .irp word, 0, 1, 2, 3
    int8_groups_word \word, \rows, \vectors, \kind
  .endr
  advance_b_pointers \vectors, 512
  advance_rows \rows, 16
  dec eax
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
// of a group is an integer; c += scale of b * sum * scale of a + minimum * the row's term, in float32, group by group.
// zmm: integer sums, float32 sums; zmm29 and zmm30 codes, then scales and minimums; zmm31 the mask.

.macro dot_codes address, c
  vpdpbusd zmm\c, zmm30, dword ptr [\address]{1to16}
.endm

.macro dot_row row, disp, c
  .if \row < 3
    dot_row_of r8, \row, \disp, \c
  .elseif \row < 6
    dot_row_of r9, %(\row - 3), \disp, \c
  .else
    dot_row_of r10, %(\row - 6), \disp, \c
  .endif
.endm

.macro dot_row_of base, strides, disp, c
  .if \strides == 0
    dot_codes \base+\disp, \c
  .elseif \strides == 1
    dot_codes \base+rsi+\disp, \c
  .else
    dot_codes \base+2*rsi+\disp, \c
  .endif
.endm

.macro load_codes base, offset
  vmovdqu64 zmm29, [\base+\offset]
  prefetcht0 [\base+\offset+3072]
  vpandd zmm30, zmm29, zmm31
.endm

.macro high_codes
  vpsrld zmm29, zmm29, 4
  vpandd zmm30, zmm29, zmm31
.endm

.macro dot_rows rows, vectors, vector, disp
  .set row, 0
  .rept \rows
    dot_row %row, %(\disp), %(row*\vectors + \vector)
    .set row, row + 1
  .endr
.endm

.macro dot_vector rows, vectors, base, offset, vector
  .set quad, 0
  .rept 4
    load_codes \base, %(\offset + quad*128)
    dot_rows \rows, \vectors, \vector, %(quad*8)
    high_codes
    dot_rows \rows, \vectors, \vector, %(quad*8 + 4)
    .set quad, quad + 1
  .endr
.endm

.macro fold integer, sum
  vcvtdq2ps zmm\integer, zmm\integer
  vmulps zmm\integer, zmm\integer, zmm29
  vfmadd231ps zmm\sum, zmm\integer, dword ptr [rax]{1to16}
  vfmadd231ps zmm\sum, zmm30, dword ptr [rax+4]{1to16}
.endm

.macro fold_vector rows, vectors, base, offset, vector
  vcvtph2ps zmm29, ymmword ptr [\base+512+\offset/2]
  vcvtph2ps zmm30, ymmword ptr [\base+576+\offset/2]
  mov rax, r11
  .set row, 0
  .rept \rows
    fold %(row*\vectors + \vector), %(\rows*\vectors + row*\vectors + \vector)
    .set row, row + 1
    .if row < \rows
      add rax, rbx
    .endif
  .endr
.endm

.macro each_pair action, rows, vectors
  .irp pair, <r12,0>, <r13,1>, <r14,2>, <r15,3>
    \action \rows, \vectors, \pair
  .endr
.endm

.macro dot_pair rows, vectors, base, index
  .if \vectors > 2*\index
    dot_vector \rows, \vectors, \base, 0, %(2*\index)
    dot_vector \rows, \vectors, \base, 64, %(2*\index + 1)
  .endif
.endm

.macro fold_pair rows, vectors, base, index
  .if \vectors > 2*\index
    fold_vector \rows, \vectors, \base, 0, %(2*\index)
    fold_vector \rows, \vectors, \base, 64, %(2*\index + 1)
    add \base, 640
  .endif
.endm

.macro load_pair rows, vectors, base, index
  .if \vectors > 2*\index
    mov \base, [rax+\index*16]
  .endif
.endm

.macro store_sum z, offset
  vmovups [rax+\offset], zmm\z
.endm

// rows*vectors <= 14; words: 4-byte words of a, 8 a group.
.macro int4_groups_tile name, rows, vectors
  .p2align 5
\name:
  save_registers
  set_row_bases \rows
  mov rax, [rsp]
  each_pair load_pair, \rows, \vectors
  mov r11, [rdi+ARG_GROUPS]
  mov rbx, [rdi+ARG_GROUPS_STRIDE]
  mov rcx, [rdi+ARG_WORDS]
  shr rcx, 3
  mov eax, 0x0f0f0f0f
  vpbroadcastd zmm31, eax
  clear_from %(\rows*\vectors), %(\rows*\vectors)
  .p2align 5
1:
  clear_from 0, %(\rows*\vectors)
  each_pair dot_pair, \rows, \vectors
  each_pair fold_pair, \rows, \vectors
  advance_rows \rows, 32
  add r11, 8
  dec rcx
  jnz 1b
  mov rax, [rdi+ARG_C]
  mov rcx, [rdi+ARG_C_STRIDE]
  .set row, 0
  .rept \rows
    .set vector, 0
    .rept \vectors
      store_sum %(\rows*\vectors + row*\vectors + vector), %(vector*64)
      .set vector, vector + 1
    .endr
    .set row, row + 1
    lea rax, [rax+rcx*4]
  .endr
  restore_registers
.endm

// ---- Every shape, and the tables that tile.h calls through -----------------------------------------------------------
// Most: [kind][vectors 1, 2, 4, 8][rows 1..14]; int4: [vectors 2, 4, 8][rows 1..7]; null: no such shape.

// registers: how many a vector of b takes; some are left for a.
.macro dot_shape action, prefix, op, rows, vectors, kind, registers
  .if \rows*\vectors + \vectors*\registers > 31 || (\vectors == 1 && (\kind == 1 || \registers > 1))
    \action none, \op, \rows, \vectors, \kind
  .else
    \action \prefix\()_\rows\()x\vectors\()_\kind, \op, \rows, \vectors, \kind
  .endif
.endm

.macro define_dot name, op, rows, vectors, kind
  .ifc \name, none
  .else
    .ifc \op, widened
      widened_tile \name, \rows, \vectors, \kind
    .else
      .ifc \op, int8_groups
        int8_groups_tile \name, \rows, \vectors, \kind
      .else
        dot_tile \name, \op, \rows, \vectors, \kind
      .endif
    .endif
  .endif
.endm

.macro enter name, op, rows, vectors, kind
  .ifc \name, none
    .quad 0
  .else
    .quad \name
  .endif
.endm

.macro each_dot action, prefix, op, registers=1
  .irp kind, 0, 1
    .irp vectors, 1, 2, 4, 8
      .irp rows, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14
        dot_shape \action, \prefix, \op, \rows, \vectors, \kind, \registers
      .endr
    .endr
  .endr
.endm

.macro int4_shape action, rows, vectors
  .if \rows*\vectors > 14
    \action none, 0, \rows, \vectors, 0
  .else
    \action int4_\rows\()x\vectors, 0, \rows, \vectors, 0
  .endif
.endm

.macro define_int4 name, op, rows, vectors, kind
  .ifnc \name, none
    int4_groups_tile \name, \rows, \vectors
  .endif
.endm

.macro each_int4 action
  .irp vectors, 2, 4, 8
    .irp rows, 1, 2, 3, 4, 5, 6, 7
      int4_shape \action, \rows, \vectors
    .endr
  .endr
.endm

.macro table name
  .globl \name
  .hidden \name
  .p2align 3
\name:
.endm

  each_dot define_dot, float32, vfmadd231ps
  each_dot define_dot, bfloat16, vdpbf16ps
  each_dot define_dot, widened, widened, 2
  each_dot define_dot, int8, vpdpbusd
  each_dot define_dot, int8_groups, int8_groups
  each_int4 define_int4

  .section .rodata.cst4, "aM", @progbits, 4
  .p2align 2
steploop_high_half:
  .long 0xffff0000

  .section .data.rel.ro, "aw", @progbits
table steploop_float32_tiles
  each_dot enter, float32, 0
table steploop_bfloat16_tiles
  each_dot enter, bfloat16, 0
table steploop_widened_tiles
  each_dot enter, widened, 0, 2
table steploop_int8_tiles
  each_dot enter, int8, 0
table steploop_int8_groups_tiles
  each_dot enter, int8_groups, 0
table steploop_int4_groups_tiles
  each_int4 enter

#endif

  .section .note.GNU-stack, "", @progbits
