"""The attention layer that trains: its weights and its batch norms.

`AxialAttention` and `LocalAttention` are this layer with their neighbourhood. The arithmetic is in the other files of
this folder; `backend.py` chooses among them.
"""

import tensorflow as tf
import tf_keras as keras

from axial.io.check import check_choice
from axial.layers.attention.backend import KERNELS, attend
from axial.layers.attention.folded import FoldedAttention
from axial.layers.batch_norm import BatchNorm, BatchNormConfig, add_norm_weights, of_sums
from axial.layers.configured import Layer
from axial.layers.conv import product
from axial.layers.device import BACKENDS, choose, import_kernels
from axial.layers.precision import wide
from axial.layers.recompute import RECOMPUTE


class LogitNorm(keras.layers.Layer):
    """The scales [terms, H] by which batch norms multiply logits: gamma / sqrt(variance + epsilon).

    Softmax ignores the mean and the offset of a batch norm. The moving mean is kept for implementations that use it.

    Args:
        terms: number of logit terms.
        heads: number of heads.
        config: `BatchNormConfig`.
        **kwargs: of Keras' layer; the dtype is float32 or float64.
    """

    def __init__(self, terms, heads, config, **kwargs):
        super().__init__(**kwargs)
        self.shape, self.config = [terms, heads], config

    def build(self, shape):
        self.gamma, self.moving_mean, self.moving_variance = add_norm_weights(self, self.shape, self.dtype)
        super().build(shape)

    def stored_scales(self):
        """The scales of inference, from the moving variance."""
        return self.gamma * tf.math.rsqrt(self.moving_variance + self.config.epsilon)

    def call(self, sums, pairs):
        """The scales of a batch. Updates the moving statistics.

        Args:
            sums: [terms, H, 2], sums of the logits and of their squares on this replica.
            pairs: number of logits in each sum.
        """
        return of_sums(self, *tf.unstack(sums, axis=2), count=pairs)[1]


class Attention(Layer):
    """Multi-head attention of every pixel to those of its neighbourhood, with batch norms.

    Args:
        spec: `AttentionSpec`: channels, heads, terms and neighbourhood.
        norm: `BatchNormConfig`.
        inner_norm: whether q, k, v and the logit terms have batch norms. The outputs always have them.
        recompute: of `RECOMPUTE`. 'softmax' saves the memory of a map of logits and repeats a third of the products.
        backend: what computes attention, of `BACKENDS`.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        InputError: `recompute` or `backend` is unknown.
    """

    def __init__(self, spec, norm=BatchNormConfig(), inner_norm=True, recompute="none", backend="auto", **kwargs):
        super().__init__(**kwargs)
        check_choice("recompute", recompute, RECOMPUTE)
        check_choice("backend", backend, BACKENDS)
        self.spec, self.norm, self.inner_norm = spec, norm, inner_norm
        self.recompute, self.backend = recompute, backend
        if inner_norm:
            self.qkv_norm = BatchNorm(norm, dtype=self.dtype_policy, name="qkv_norm")
            options = dict(dtype=wide(self.compute_dtype).name, name="logit_norm")
            self.logit_norm = LogitNorm(len(spec.terms), spec.heads, norm, **options)
        self.content_output_norm = BatchNorm(norm, dtype=self.dtype_policy, name="content_output_norm")
        if spec.value_position:
            self.position_output_norm = BatchNorm(norm, dtype=self.dtype_policy, name="position_output_norm")

    def build(self, shape):
        self.kernel = self.add_weight(
            "kernel",
            [shape[-1], sum(self.spec.sizes)],
            initializer=keras.initializers.VarianceScaling(1.0, "fan_in"),
        )
        self.tables = self.spec.add_tables(self)
        norms = {"content_output_norm": self.spec.value_channels}
        if self.inner_norm:
            norms |= {"qkv_norm": sum(self.spec.sizes), "logit_norm": None}
        if self.spec.value_position:
            norms["position_output_norm"] = self.spec.value_channels
        for name, channels in norms.items():  # built here, because not every path through `call` calls every norm
            with tf.name_scope(name):
                getattr(self, name).build([channels])
        super().build(shape)

    def call(self, x, training=False):
        in_training, training = training, training and self.trainable and not self.norm.frozen
        x = self.sized(x)
        windows = self.spec.windows(x)
        lines = tf.cast(tf.shape(x)[0], wide(x.dtype)) * windows.rows
        pairs = windows.pairs * lines
        tables = self.spec.neighborhood.lookup_tables(self.tables)
        if choose(self.backend, lambda: self._kernels_can_serve(x, windows)) == "kernel":
            with tf.name_scope(windows.scope):
                return self._call_kernels(x, tables, windows, pairs=pairs, training=training)
        if self.inner_norm and training:
            qkv = self.qkv_norm(product(x, self.kernel), training=True)
        else:
            qkv = product(x, self.kernel, self.qkv_norm if self.inner_norm else lambda y: y)
        q, k, v = tf.split(qkv, self.spec.sizes, 3)
        options = dict(heads=self.spec.heads, terms=self.spec.terms, backend=self.backend)
        options |= dict(recompute=self.recompute, training=in_training)
        with tf.name_scope(windows.scope):
            scales = self._scales(pairs, training)
            content, position = attend(q, k, v, tables, windows=windows, scales=scales, **options)
        output = self.content_output_norm(content, training=training)
        if position is not None:
            output += self.position_output_norm(position, training=training)
        return output

    def _scales(self, pairs, training):
        """The scales of the logit terms; see `reference.attend`."""
        if not self.inner_norm:
            return dict.fromkeys(self.spec.terms, tf.ones([self.spec.heads], wide(self.compute_dtype)))
        if training and self.logit_norm.trainable:
            return lambda sums: self._by_term(self.logit_norm(sums, pairs))
        return self._by_term(self.logit_norm.stored_scales())

    def _by_term(self, scales):
        return dict(zip(self.spec.terms, tf.unstack(scales)))

    # === Kernels of a TPU ===

    def _kernels_can_serve(self, x, windows):
        return self.inner_norm and import_kernels(KERNELS).can_serve(x, self.kernel, self.spec, windows)

    def _call_kernels(self, x, tables, windows, *, pairs, training):
        """What `call` returns, computed by the kernels."""
        pixels = tf.cast(tf.reduce_prod(tf.shape(x)[:3]), tf.float32)
        norms = self.content_output_norm, self.position_output_norm

        def affine(norm, sums):
            of_batch = training and norm.trainable
            return tf.stack(norm.affine(*tf.unstack(sums), count=pixels) if of_batch else norm.folded())

        def of_batch(sums):
            return self.logit_norm(sums, pairs)

        return import_kernels(KERNELS).project_and_attend(
            x,
            tf.convert_to_tensor(self.kernel),
            self.spec,
            tables,
            windows=windows,
            qkv_affine=lambda sums: affine(self.qkv_norm, sums),
            logit_scales=of_batch if training and self.logit_norm.trainable else self.logit_norm.stored_scales(),
            output_affines=lambda sums: tf.stack([affine(*pair) for pair in zip(norms, tf.unstack(sums))]),
        )

    # === Folding ===

    def folded(self):
        """A `FoldedAttention` of the same sizes, not built yet. `folded_weights` has the values of its weights."""
        return FoldedAttention(self.spec, self.backend, name=self.name, dtype=self.dtype_policy)

    def folded_weights(self):
        """Values for the weights of `folded`, in their order.

        - The batch norm of q, k and v goes into the projections and their biases.
        - Each logit term keeps a scale for each head. Scales inside q and k would have to be divided out of the content
          term, and a scale near zero would make a weight that overflows float16.
        - The scale of the content output goes into v. The scale of the position output stays, because all heads share
          its table.
        - The weights of a softmax sum to one, so what the output norms add goes into the bias of v.
        """
        spec = self.spec
        dtype = wide(self.compute_dtype)
        scale, shift = tf.ones([self.kernel.shape[1]], dtype), tf.zeros([self.kernel.shape[1]], dtype)
        scales = tf.ones([len(spec.terms), spec.heads], dtype)
        if self.inner_norm:
            scale, shift = self.qkv_norm.folded()
            scales = self.logit_norm.stored_scales()
        rest = tf.unstack(scales)
        output_scale, output_shift = self.content_output_norm.folded()
        if spec.value_position:
            position_scale, position_shift = self.position_output_norm.folded()
            output_shift += position_shift
            rest.append(position_scale)
        on_columns = tf.concat([tf.ones([2 * spec.key_channels], output_scale.dtype), output_scale], 0)
        kernels = tf.split(self.kernel * scale * on_columns, spec.sizes, 1)
        q_bias, k_bias, v_bias = tf.split(shift * on_columns, spec.sizes)
        return [*kernels, q_bias, k_bias, v_bias + output_shift, *self.tables.values(), *rest]

    # === Config ===

    @classmethod
    def from_config(cls, config):
        """See `Configured`. A file of axial 0.2 holds the settings of its batch norms alone."""
        norm = config.get("norm")
        if isinstance(norm, dict) and "axial" not in norm:
            config = {**config, "norm": BatchNormConfig(**norm)}
        return super().from_config(config)
