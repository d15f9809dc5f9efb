"""Kernels of triton_topk, triton_fp8 and triton_nvfp4: needs triton; what launches them imports it when it launches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(values):
    """int32 that order as the values do, of their own bits: -0 is +0, NaN of either sign is above +inf."""
    infinity: tl.constexpr = (
        0x7F800000 if values.dtype == tl.float32 else 0x7F80 if values.dtype == tl.bfloat16 else 0x7C00
    )
    quiet: tl.constexpr = (
        0x7FC00000 if values.dtype == tl.float32 else 0x7FC0 if values.dtype == tl.bfloat16 else 0x7E00
    )
    if values.dtype == tl.float32:
        bits = values.to(tl.int32, bitcast=True)
        magnitudes = bits & 0x7FFFFFFF
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
        magnitudes = bits & 0x7FFF
    found = tl.where(bits < 0, -1 - magnitudes, magnitudes)
    return tl.where(magnitudes > infinity, quiet, tl.where(magnitudes == 0, 0, found))


@triton.jit
def values_of(order, VALUE: tl.constexpr):
    """What `ordered` was given, in the dtype VALUE."""
    magnitudes = tl.where(order < 0, -1 - order, order)
    if VALUE == tl.float32:  # noqa: SIM300 - VALUE is no constant of this module
        return tl.where(order < 0, magnitudes | -0x80000000, magnitudes).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return tl.where(order < 0, magnitudes | 0x8000, magnitudes).to(tl.int16).to(VALUE, bitcast=True)


@triton.jit
def compose(order, place, WIDE: tl.constexpr):
    """A key, the larger the better: order, then the smaller place; 32 bits of each if WIDE, else 16."""
    if WIDE:
        return (order.to(tl.int64) << 32) | (0xFFFFFFFF - place.to(tl.int64))
    else:
        return (order << 16) | (0xFFFF - place)


@triton.jit
def place_of(key, WIDE: tl.constexpr):
    """The place that a key was composed of; of the lowest key one beyond all others."""
    if WIDE:
        return 0xFFFFFFFF - (key & 0xFFFFFFFF)
    else:
        return 0xFFFF - (key & 0xFFFF)


@triton.jit
def lowest(WIDE: tl.constexpr):
    """Below every key that is composed of a value."""
    return -0x8000000000000000 if WIDE else -0x80000000


@triton.jit
def load_order(logits, scale, row_scale, columns, real, VALUE: tl.constexpr, SCALED: tl.constexpr):
    """The order of some logits of a row, scaled if there are scales, then rounded to VALUE; others are never read."""
    found = tl.load(logits + columns, mask=real, other=0.0)
    if SCALED:
        found = found.to(tl.float32) * tl.load(scale + columns, mask=real, other=1.0) * row_scale
    return ordered(found.to(VALUE))


@triton.jit
def await_the_kernel_before(OVERLAP: tl.constexpr):
    """If this launch may overlap that of the kernel before: wait until all that it writes is there; let the next in."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["groups", "tiles"])
def group_keys(
    logits, scale, row_scales, keys, row_stride, num_org, groups, tiles,
    VALUE: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The key of the best of each GROUP neighbours of a row: order and group. A program: TILE groups of one row."""
    await_the_kernel_before(OVERLAP)
    row = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    group = first + tl.arange(0, TILE)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row_scale = tl.load(row_scales + row) if SCALED else 1.0
    here = logits + row.to(tl.int64) * row_stride
    if (first + TILE) * GROUP <= num_org:  # nothing to mask: loads of 16 bytes
        every = tl.full([TILE, GROUP], True, tl.int1)
        best = tl.max(load_order(here, scale, row_scale, columns, every, VALUE, SCALED), axis=1)
    else:
        real = columns < num_org
        order = load_order(here, scale, row_scale, columns, real, VALUE, SCALED)
        best = tl.max(tl.where(real, order, -0x80000000), axis=1)
    tl.store(keys + row.to(tl.int64) * groups + group, compose(best, group, WIDE), mask=group < groups)


@triton.jit(do_not_specialize=["groups", "first_id"])
def best_of_groups(
    logits, scale, row_scales, keys, out_keys, out_values, out_columns, row_stride, num_org, groups, first_id,
    VALUE: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PICKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The K best of a row, which are in the K best of its groups. A program: one row.

    A token that is in no such group has K better ones: the best of each group that went before its own, which have a
    larger value, or an equal one in a column before it. DIRECT: a key has room for the column itself; without it, the
    place of a member among those of the chosen groups, which then are brought in order, stands for its column.
    """
    await_the_kernel_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place, index, member = tl.arange(0, PICKS), tl.arange(0, GROUPS), tl.arange(0, GROUP)
    found = tl.load(keys + row * groups + index, mask=index < groups, other=lowest(WIDE))
    chosen = place_of(tl.topk(found, PICKS), WIDE)
    if not DIRECT:
        chosen = tl.sort(chosen)
    columns = chosen[:, None] * GROUP + member[None, :]
    row_scale = tl.load(row_scales + row) if SCALED else 1.0
    real = columns < num_org
    order = load_order(logits + row * row_stride, scale, row_scale, columns, real, VALUE, SCALED)
    places = columns if DIRECT else place[:, None] * GROUP + member[None, :]
    members = tl.where(real, compose(order, places, WIDE), lowest(WIDE))
    picks = tl.topk(tl.reshape(members, [PICKS * GROUP]), PICKS)
    column = place_of(picks, WIDE)
    if not DIRECT:
        group = tl.sum(tl.where((column // GROUP)[:, None] == place[None, :], chosen[None, :], 0), axis=1)
        column = group * GROUP + column % GROUP
    column = column.to(tl.int64)
    values = values_of((picks >> (32 if WIDE else 16)).to(tl.int32), VALUE)
    if PACKED:
        wide = values.to(tl.float32)
        absent = (picks == lowest(WIDE)) | (wide == float("-inf"))
        low = tl.where(absent, 0, 0xFFFFFFFF - column - first_id)
        order = tl.where(absent, -0x7F800001, ordered(wide)).to(tl.int64)
        tl.store(out_keys + row * K + place, (order << 32) | low, mask=place < K)
    else:
        tl.store(out_values + row * K + place, values, mask=place < K)
        tl.store(out_columns + row * K + place, column, mask=place < K)


@triton.jit(do_not_specialize=["count"])
def best_of_keys(
    keys, out_values, out_ids, count,
    K: tl.constexpr, COUNT: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """The K largest of a row's packed keys, as values and token ids; nothing but NaN and -1 where the first is NaN."""
    row = tl.program_id(0).to(tl.int64)
    place, index = tl.arange(0, PICKS), tl.arange(0, COUNT)
    found = tl.load(keys + row * count + index, mask=index < count, other=lowest(True))
    picks = tl.topk(found, PICKS)
    invalid = tl.max(picks) >= 0x7F80000100000000
    low = picks & 0xFFFFFFFF
    order = tl.where(invalid, 0x7FC00000, tl.where(low == 0, -0x7F800001, picks >> 32)).to(tl.int32)
    ids = tl.where(invalid | (low == 0), -1, 0xFFFFFFFF - low)
    tl.store(out_values + row * K + place, values_of(order, tl.float32), mask=place < K)
    tl.store(out_ids + row * K + place, ids, mask=place < K)


@triton.jit(do_not_specialize=["tiles"])
def scale_tile(
    raw, row_scales, scale, logits, row_stride, columns, tiles,
    VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """raw * row scale * column scale in float32, rounded once to VALUE. A program: TILE columns of a row."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    there = column < columns
    found = tl.load(raw + row * row_stride + column, mask=there, other=0.0).to(tl.float32)
    found = found * tl.load(scale + column, mask=there, other=0.0) * tl.load(row_scales + row)
    tl.store(logits + row * columns + column, found.to(VALUE), mask=there)


@triton.jit
def quantise_row(
    x, packed, scales, row_stride, units,
    LARGEST: tl.constexpr, TINY: tl.constexpr, EPS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """A row of x in float8_e4m3fn with one scale, amax / LARGEST. A program: one row."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, UNITS)
    there = unit < units
    found = tl.load(x + row * row_stride + unit, mask=there, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(found))
    scale = tl.where(amax == 0, EPS, tl.maximum(tl.div_rn(amax, LARGEST), TINY))
    scaled = tl.clamp(tl.div_rn(found, tl.full([UNITS], scale, tl.float32)), -LARGEST, LARGEST)
    tl.store(packed + row * units + unit, scaled.to(tl.float8e4nv), mask=there)
    tl.store(scales + row, scale)


@triton.jit
def e2m1_pairs(words, scales):
    """e2m1_entries of two words at a time, in the halves of a register: shifts, masks, and a product for two entries.

    The bits of a code are brought to those of a bfloat16, sign to sign: that is the entry * 2**-126, exactly.
    """
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 sizes;
        shl.b32 sizes, $4, 6;
        and.b32 sizes, sizes, 0x01c001c0;
        shl.b32 $0, $4, 12;
        lop3.b32 $0, $0, 0x80008000, sizes, 0xea;
        mul.bf16x2 $0, $0, $5;
        shl.b32 sizes, $4, 2;
        and.b32 sizes, sizes, 0x01c001c0;
        shl.b32 $1, $4, 8;
        lop3.b32 $1, $1, 0x80008000, sizes, 0xea;
        mul.bf16x2 $1, $1, $5;
        shr.b32 sizes, $4, 2;
        and.b32 sizes, sizes, 0x01c001c0;
        shl.b32 $2, $4, 4;
        lop3.b32 $2, $2, 0x80008000, sizes, 0xea;
        mul.bf16x2 $2, $2, $5;
        shr.b32 sizes, $4, 6;
        and.b32 sizes, sizes, 0x01c001c0;
        lop3.b32 $3, $4, 0x80008000, sizes, 0xea;
        mul.bf16x2 $3, $3, $5;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r",
        args=[words, scales],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def e2m1_entry(words, scales, PLACE: tl.constexpr):
    """One of e2m1_entries, in steps that the interpreter knows: float32, since it knows no product of bfloat16."""
    code = words.to(tl.int32) >> (4 * PLACE)
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << (tl.maximum(exponent, 1) - 1)).to(tl.float32))
    return tl.where((code & 8) != 0, -size, size) * 2.0**-126 * scales.to(tl.float32)


@triton.jit
def e2m1_entries(words, scales, PAIRS: tl.constexpr):
    """The four entries of int16 words, first in the low bits, * 2**-126 * scales: exact if that is normal."""
    if PAIRS:
        return e2m1_pairs(words, scales)
    else:
        return (
            e2m1_entry(words, scales, 0),
            e2m1_entry(words, scales, 1),
            e2m1_entry(words, scales, 2),
            e2m1_entry(words, scales, 3),
        )


@triton.jit(do_not_specialize=["rows", "width", "row_tiles"])
def nvfp4_product(
    x, words, scales, global_scale, logits, row_stride, rows, width, word_stride, scale_stride, row_tiles,
    DIVIDES: tl.constexpr, PAIRS: tl.constexpr, ALL_UNITS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Logits of ROWS rows and TILE columns. Entries times group scales are exact in bfloat16; sums are float32.

    Each int16 word has four neighbouring units; the sum takes first the first of all words of UNITS units, then the
    second, and so on, so that entries go from registers into the product as they lie.
    """
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // row_tiles * TILE + tl.arange(0, TILE)
    unit, word, group = tl.arange(0, UNITS), tl.arange(0, UNITS // 4), tl.arange(0, UNITS // 16)
    x_here = x + tl.minimum(row, rows - 1)[:, None] * row_stride + unit[None, :]  # what is beyond is not stored
    inside = tl.minimum(column, width - 1).to(tl.int64)[:, None]
    words_here = words + inside * word_stride + word[None, :]
    scales_here = scales + inside * scale_stride + group[None, :]
    sums = tl.zeros([TILE, ROWS], tl.float32)
    for first in tl.range(0, ALL_UNITS, UNITS, num_stages=STAGES):
        if ALL_UNITS % UNITS == 0:
            given, packed, scale = tl.load(x_here), tl.load(words_here), tl.load(scales_here)
        else:
            left = ALL_UNITS - first
            given = tl.load(x_here, mask=unit[None, :] < left, other=0.0)
            packed = tl.load(words_here, mask=word[None, :] * 4 < left, other=0)
            scale = tl.load(scales_here, mask=group[None, :] * 16 < left, other=0.0)
        scale = (scale.to(tl.float32) * 2.0**118).to(tl.bfloat16)
        of_words = tl.broadcast_to(scale[:, :, None], [TILE, UNITS // 16, 4])
        first_entry, second_entry, third_entry, fourth_entry = e2m1_entries(
            packed, tl.reshape(of_words, [TILE, UNITS // 4]), PAIRS
        )
        given = given if PAIRS else given.to(tl.float32)
        even, odd = tl.split(tl.reshape(given, [ROWS, UNITS // 4, 2, 2]))
        first_unit, third_unit = tl.split(even)
        second_unit, fourth_unit = tl.split(odd)
        sums = tl.dot(first_entry, tl.trans(first_unit), sums, input_precision="ieee")
        sums = tl.dot(second_entry, tl.trans(second_unit), sums, input_precision="ieee")
        sums = tl.dot(third_entry, tl.trans(third_unit), sums, input_precision="ieee")
        sums = tl.dot(fourth_entry, tl.trans(fourth_unit), sums, input_precision="ieee")
        x_here += UNITS
        words_here += UNITS // 4
        scales_here += UNITS // 16
    sums *= 256.0  # of 2**(126 - 118)
    overall = tl.zeros([TILE, ROWS], tl.float32) + tl.load(global_scale)
    sums = tl.div_rn(sums, overall) if DIVIDES else sums * overall
    there = (column < width)[:, None] & (row < rows)[None, :]
    places = row.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(logits + places, sums.to(logits.dtype.element_ty), mask=there)
