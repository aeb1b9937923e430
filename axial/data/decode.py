"""Decodes a photo's file to pixels in TensorFlow, for training, evaluation and exports.

Each pixel value equals Pillow's (`io.images.open_photo`). Pillow checks photos before the conversion and reads them for
axial-predict. With TensorFlow's default DCT method for JPEGs, two thirds of the values would differ by rounding.
"""

import functools

import tensorflow as tf

from axial.data.levels import DEEP_DIVISORS, DEPTH, NOISE, NOISE_VALUES, PERCENTILES
from axial.io.images import LARGEST_PIXELS, MOST_SCANNED, TIFF_STARTS

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM")  # JPEG, PNG, GIF and BMP; WebP's is in `_format`
_JPEG, _PNG, _GIF, _BMP, _WEBP, _OTHER = range(6)
_EXIF, _ADOBE = b"Exif\0\0", b"\xff\xee\0\x0eAdobe"
_UNITS = [0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 0]  # bytes of a value, by TIFF type; 0 if undefined
_MOST_PARTS = 2**16  # most segments, chunks or blocks to visit; a PNG of 512 MB may have as many chunks of 8 kB


def decode(encoded, levels=DEPTH):
    """Decodes a photo's file, string [], to uint8 [h, w, 3], without applying its EXIF orientation.

    The rule `levels` scales 16-bit values to 8 bits; see `levels.eight_bits`. Only old versions of axial, whose only
    rule was 'depth', wrote records with 16-bit photos. Transparency is dropped. If a JPEG, PNG or GIF has several
    pictures, the first is decoded.

    TensorFlow raises InvalidArgumentError for a damaged file, and for a file that it cannot decode like Pillow: any
    format but JPEG, PNG, WebP, GIF and BMP; a CMYK JPEG without Adobe's marker; an animated WebP; a GIF whose first
    picture does not fill its canvas; a BMP with 1, 4 or 16 bits a pixel or with run lengths. The same error is
    raised for a PNG of more pixels or a JPEG of more scans than `open_image` accepts.
    """
    is_jpeg = _slice(encoded, 0, 3) == _SIGNATURES[_JPEG]
    image = tf.cond(is_jpeg, lambda: _jpeg(encoded), lambda: _not_jpeg(encoded, levels))
    return tf.ensure_shape(image, [None, None, 3])


def _rare(function):
    """Wraps a branch in one op, because few photos take it: TensorFlow visits all ops of a branch that is not taken."""
    in_graph = tf.function(function, autograph=False, experimental_attributes={"_noinline": True})

    @functools.wraps(function)
    def branch(*args):
        return function(*args) if tf.executing_eagerly() else in_graph(*args)

    return branch


@_rare
def _not_jpeg(encoded, levels):
    decoders = {_PNG: functools.partial(_png, levels=levels), _GIF: _gif, _BMP: _bmp, _WEBP: _webp, _OTHER: _other}
    branches = {key: functools.partial(one, encoded) for key, one in decoders.items()}
    return tf.switch_case(_format(encoded), {**branches, _JPEG: branches[_OTHER]})


def turn(image, orientation):
    """Turns and mirrors uint8 [h, w, 3] by its EXIF orientation, int [] from 1 to 8, to the upright photo."""
    orientation = tf.cast(orientation, tf.int32)
    upright = tf.cond(orientation == 1, lambda: image, lambda: _turn(image, orientation))
    return tf.ensure_shape(upright, [None, None, 3])


@_rare
def _turn(image, orientation):
    def turned(mirror, quarters):
        x = image[:, ::-1] if mirror else image
        for _ in range(quarters):  # tf.image.rot90 would trace four branches
            x = tf.transpose(x[:, ::-1], [1, 0, 2])
        return x

    # For each orientation: whether to mirror the image, then the number of counterclockwise quarter turns.
    turns = [(False, 0), (True, 0), (False, 2), (True, 2), (True, 1), (False, 3), (True, 3), (False, 1)]
    return tf.switch_case(orientation - 1, [functools.partial(turned, *one) for one in turns])


def _format(encoded):
    """int32 []: index of the file format, `_JPEG` to `_OTHER`, according to the first bytes."""
    matches = [_slice(encoded, 0, len(start)) == start for start in _SIGNATURES]
    webp = (_slice(encoded, 0, 4) == b"RIFF") & (_slice(encoded, 8, 4) == b"WEBP")
    return tf.argmax(tf.cast(tf.stack([*matches, webp, True]), tf.int32), output_type=tf.int32)


# === Pixels ===


def _refuse(unless, text):
    text = tf.strings.join(["encoded: ", text, "; save the photo as a PNG or RGB JPEG"])
    return tf.control_dependencies([tf.debugging.Assert(unless, [text])])


def _jpeg(encoded):
    height, width, inks = tf.unstack(tf.cast(tf.io.extract_jpeg_shape(encoded), tf.int64))
    data = tf.io.decode_raw(encoded, tf.uint8)
    few = tf.math.count_nonzero(_matches(data, b"\xff\xda")) * height * width <= MOST_SCANNED
    has_adobe = tf.cond(inks == 4, lambda: tf.reduce_any(_matches(data, _ADOBE)), lambda: True)
    with _refuse(has_adobe, "a CMYK JPEG without the marker of Adobe"), _refuse(few, "a JPEG of too many scans"):
        return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")


def _png(encoded, levels):
    def deep():
        values = tf.cast(tf.io.decode_png(encoded, channels=3, dtype=tf.uint16), tf.int32)
        if levels == PERCENTILES:
            grey = _bytes(encoded, 25, 1)[0] & 2 == 0
            return _by_percentiles(values[..., : tf.where(grey, 1, 3)]) + tf.zeros_like(values, tf.uint8)
        beyond = tf.reduce_max(values) >= [256 * divisor for divisor in DEEP_DIVISORS[:-1]]
        return tf.cast(values // tf.gather(DEEP_DIVISORS, tf.math.count_nonzero(beyond)), tf.uint8)

    pixels = tf.reduce_prod([tf.cast(_number(encoded, offset, big=True), tf.int64) for offset in (16, 20)])
    with _refuse(pixels <= LARGEST_PIXELS, f"a PNG of too many pixels, at most {LARGEST_PIXELS} are read"):
        return tf.cond(_bytes(encoded, 24, 1)[0] == 16, deep, lambda: tf.io.decode_png(encoded, channels=3))


def _by_percentiles(values):
    """Scales 16-bit values, int32 [h, w, n], to uint8 of the same shape; see `levels.eight_bits`."""
    size = tf.size(values)
    last = size - 1
    rank = tf.minimum(tf.cast(tf.sqrt(tf.cast(size, tf.float64)), tf.int32) // 4 + 1, last // 2)
    low, high, first, final = tf.unstack(_ranked(values, [rank, last - rank, 0, last]))
    low, high = tf.unstack(tf.where(low < high, [low, high], [first, final]))
    rows = values[:: tf.maximum(size // NOISE_VALUES, 1)]
    changes = tf.abs(rows[:, 1:] - rows[:, :-1])
    noise = tf.where(tf.size(changes) > 0, _ranked(changes, [tf.size(changes) // 2])[0], 0)
    extent = tf.maximum(tf.maximum(high - low, NOISE * noise), 1)
    return tf.cast((510 * (tf.clip_by_value(values, low, high) - low) + extent) // (2 * extent), tf.uint8)


def _ranked(values, ranks):
    """int32 [R]: the 16-bit `values` at `ranks`, int [R], in ascending order. The least value has rank 0."""
    upto = tf.cumsum(tf.math.bincount(tf.reshape(values, [-1]), minlength=2**16))
    return tf.searchsorted(upto, ranks, side="right")


def _gif(encoded):
    """Decodes a GIF's first picture, without its transparency flag: TensorFlow paints transparent pixels black."""

    def step(offset, skipping, flag):
        head = _bytes(encoded, offset, 2)
        extension = (head[0] == 0x21) & ~skipping
        flag = tf.where(extension & (head[1] == 0xF9), offset + 3, flag)
        return offset + tf.where(extension, 2, 1 + head[0]), extension | (skipping & (head[0] > 0)), flag

    size, table = tf.strings.length(encoded), _bytes(encoded, 10, 1)[0]
    start = 13 + tf.where(table >= 128, tf.bitwise.left_shift(6, table & 7), 0)  # the palette has 3 x 2^(n + 1) bytes
    picture, _, flag = tf.while_loop(
        lambda offset, skipping, _: (offset < size) & (skipping | (_bytes(encoded, offset, 1)[0] != 0x2C)),
        step,
        (start, tf.constant(False), size),  # `size` as the flag's offset means that there is no flag
        maximum_iterations=_MOST_PARTS,
    )
    frame, canvas = _bytes(encoded, picture + 1, 8), _bytes(encoded, 6, 4)
    opaque = tf.gather(tf.constant([bytes([i & 0xFE]) for i in range(256)]), _bytes(encoded, flag, 1)[0])
    parts = _slice(encoded, 0, flag), tf.where(flag < size, opaque, b""), _slice(encoded, flag + 1, size)
    with _refuse(tf.reduce_all(frame == tf.concat([[0] * 4, canvas], 0)), "a GIF whose first picture does not fill it"):
        return tf.io.decode_image(tf.strings.join(parts), channels=3, expand_animations=False)


def _bmp(encoded):
    """Decodes a BMP. TensorFlow returns an 8-bit BMP's palette indices as grey; `look_up` gets their colours."""

    def look_up():
        first, used = _number(encoded, 14) + 14, _number(encoded, 46)
        used = tf.where(used == 0, 256, used)
        colors = tf.cast(_bytes(encoded, first, 1024), tf.uint8)
        colors = tf.reshape(colors, [256, 4])[:, 2::-1] * tf.cast(tf.range(256) < used, tf.uint8)[:, None]
        return tf.gather(colors, tf.cast(image[..., 0], tf.int32))

    bits, kind = _bytes(encoded, 28, 1)[0], _number(encoded, 30)
    usual = tf.reduce_all([_number(encoded, 54 + 4 * i) == 255 << 8 * (2 - i) for i in range(3)])  # colour masks
    plain = (kind == 0) & ((bits == 8) | (bits == 24) | (bits == 32)) | (kind == 3) & (bits == 32) & usual
    with _refuse(plain & (_number(encoded, 14) >= 40), "a BMP of other colours than 8, 24 or 32 plain bits a pixel"):
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return tf.cond(bits == 8, look_up, lambda: image)


def _webp(encoded):
    if not hasattr(tf.io, "decode_webp"):  # before TensorFlow 2.20
        return _other(encoded)
    moving = (_slice(encoded, 12, 4) == b"VP8X") & (_bytes(encoded, 20, 1)[0] & 2 > 0)
    with _refuse(~moving, "a moving WebP"):  # TensorFlow 2.20 crashes on a moving WebP
        return tf.io.decode_webp(encoded)[0, :, :, :3]


def _other(encoded):
    is_tiff = tf.reduce_any(_slice(encoded, 0, 4) == tf.constant(TIFF_STARTS))
    kind = tf.where(is_tiff, "a TIFF, which only axial-predict reads", "not a JPEG, PNG, WebP, GIF or BMP")
    with _refuse(False, kind):
        return tf.zeros([1, 1, 3], tf.uint8)


# === Orientation ===


def orientation(encoded):
    """int32 []: EXIF orientation, 1 to 8, of a photo's file, string []; 1 if it has none.

    The EXIF block is in a JPEG's segments before its first scan, in a PNG's chunk 'eXIf' or in a WebP's chunk 'EXIF'.
    The tag is 0x0112 (EXIF 2.32, Sec. 4.6.4). The value equals `io.images.orientation`.
    """
    blocks = {_JPEG: _jpeg_block, _PNG: _png_block, _WEBP: _webp_block}
    searches = {key: functools.partial(blocks.get(key, _no_block), encoded) for key in range(_OTHER + 1)}
    value = _exif_orientation(tf.switch_case(_format(encoded), searches))
    return tf.where((value >= 1) & (value <= 8), value, 1)


def _no_block(_):
    return tf.constant(b"")


def _walk(encoded, step, offset):
    """Walks a file from `offset` to its end: `step` maps (offset, block) to the next pair. Returns the last block."""
    size, start = tf.strings.length(encoded), (offset, tf.constant(b""))
    offset, block = tf.while_loop(lambda offset, _: offset < size, step, start, maximum_iterations=_MOST_PARTS)
    with _refuse(offset >= size, f"a file of more than {_MOST_PARTS} parts"):
        return tf.identity(block)


def _jpeg_block(encoded):
    """The EXIF block of a JPEG, joined if several segments hold it."""

    def step(offset, exif):
        head = _bytes(encoded, offset, 4)
        code, length = head[1], 256 * head[2] + head[3]
        segment = _slice(encoded, offset + 4, tf.where(code == 0xE1, length - 2, 0))
        exif = tf.where(_slice(segment, 0, 6) == _EXIF, exif + _slice(segment, 6, length), exif)
        alone = (code <= 1) | ((code >= 0xD0) & (code <= 0xD8))  # a marker without a segment
        filling = (head[0] != 0xFF) | (code == 0xFF)
        offset += tf.where(filling, 1, tf.where(alone, 2, 2 + tf.maximum(length, 1)))
        scan = ~filling & ((code == 0xDA) | (code == 0xD9))
        return tf.where(scan, size, offset), exif

    size = tf.strings.length(encoded)
    return _walk(encoded, step, 2)


def _png_block(encoded):
    def step(offset, exif):
        length = tf.minimum(_number(encoded, offset, big=True), size)
        named = _slice(encoded, offset + 4, 4) == b"eXIf"
        return tf.minimum(offset + 12 + length, size), tf.where(named, _slice(encoded, offset + 8, length), exif)

    size = tf.strings.length(encoded)
    return _walk(encoded, step, 8)


def _webp_block(encoded):
    def step(offset, exif):
        length = tf.minimum(_number(encoded, offset + 4), size)
        first = (_slice(encoded, offset, 4) == b"EXIF") & (exif == b"")
        exif = tf.where(first, _slice(encoded, offset + 8, length), exif)
        return tf.minimum(offset + 8 + length + length % 2, size), exif

    size = tf.strings.length(encoded)
    return _walk(encoded, step, 12)


def _exif_orientation(block):
    """int32 []: orientation tag of an EXIF block, string []. 0 without a tag; 9 if the value or block is invalid."""
    for _ in range(2):  # skips the block's name, which some programs write twice
        block = tf.where(_slice(block, 0, 6) == _EXIF, _slice(block, 6, tf.strings.length(block)), block)
    order, size = _slice(block, 0, 4), tf.strings.length(block)
    little = _slice(order, 0, 2) == b"II"
    is_exif = tf.reduce_any(tf.stack([b"II*\0", b"II\0*", b"MM\0*", b"MM*\0"]) == order)

    def number(offsets, count):
        """int32: the numbers of `count` bytes at `offsets` in the block."""
        data = tf.cast(tf.pad(tf.io.decode_raw(block, tf.uint8), [[0, 16]]), tf.int64)
        data = tf.gather(data, tf.clip_by_value(offsets, 0, size)[..., None] + tf.range(count))
        data = tf.where(little, data[..., ::-1], data)
        powers = tf.constant([256**i for i in reversed(range(count))], tf.int64)
        return tf.cast(tf.clip_by_value(tf.reduce_sum(data * powers, -1), 0, 2**30), tf.int32)

    first = number(tf.constant(4), 4)
    entries = first + 2 + 12 * tf.range(number(first, 2))
    entries = tf.boolean_mask(entries, entries + 12 <= size)
    kinds, offset = number(entries + 2, 2), number(entries + 8, 4)
    unit = tf.gather(tf.constant(_UNITS), tf.minimum(kinds, len(_UNITS) - 1))
    length = unit * tf.minimum(number(entries + 4, 4), 2**26)
    there = (length > 0) & ((length <= 4) | (offset <= size - length)) & (number(entries, 2) == 0x0112)
    offset = tf.where(length > 4, offset, entries + 8)
    values = tf.reduce_sum([tf.where(unit == count, number(offset, count), 0) for count in (1, 2, 4, 8)], 0)
    whole = tf.reduce_any([kinds == kind for kind in (3, 4, 6, 8, 9, 13, 16)], 0)
    values = tf.boolean_mask(tf.where(whole & (values > 0), values, 9), there)
    value = tf.concat([values, [0]], 0)[0]
    return tf.where(is_exif | (size == 0), value, 9)


# === Bytes ===


def _slice(text, offset, length):
    """string []: `length` bytes of `text`, string [], from `offset` on, or fewer at its end."""
    return tf.strings.substr(text, tf.clip_by_value(offset, 0, tf.strings.length(text)), tf.maximum(length, 0))


def _bytes(text, offset, count):
    """int32 [count]: bytes of `text`, string [], from `offset` on; 0 behind its end."""
    return tf.cast(tf.io.decode_raw(_slice(text, offset, count), tf.uint8, fixed_length=count), tf.int32)


def _number(text, offset, big=False):
    """int32 []: the four bytes from `offset` on as a number, clipped to 2^30; little-endian unless `big`."""
    data = tf.cast(_bytes(text, offset, 4), tf.int64)
    powers = tf.constant([256 ** (3 - i if big else i) for i in range(4)], tf.int64)
    return tf.cast(tf.minimum(tf.reduce_sum(data * powers), 2**30), tf.int32)


def _matches(data, pattern):
    """bool [n]: whether `pattern` begins at each byte of `data`, uint8 [n]."""
    padded = tf.pad(data, [[0, len(pattern)]])
    return tf.reduce_all([padded[i : i + tf.size(data)] == byte for i, byte in enumerate(pattern)], 0)
