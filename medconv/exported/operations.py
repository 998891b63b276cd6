"""The operations that a network in a file may consist of: functions of tensors, without a say in files or processes."""

from __future__ import annotations

# Of `torch.ops.aten`, without overloads and the underscore of those that work in place.
_COMPUTES = """
_convolution conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d linear batch_norm
instance_norm group_norm layer_norm native_batch_norm native_group_norm native_layer_norm _native_batch_norm_legit
_native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_no_update relu relu6 leaky_relu prelu rrelu elu celu
selu gelu silu mish sigmoid log_sigmoid tanh hardtanh hardswish hardsigmoid softplus softmax _softmax log_softmax
_log_softmax glu add sub mul div rsub neg pow square sqrt rsqrt reciprocal exp log abs sign floor ceil round remainder
floor_divide true_divide clamp clamp_min clamp_max maximum minimum where eq ne lt le gt ge logical_not logical_and
logical_or masked_fill mean sum var std var_mean amax amin max min prod norm linalg_vector_norm cumsum matmul mm bmm
addmm baddbmm einsum scaled_dot_product_attention max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
upsample_bicubic2d pixel_shuffle grid_sampler grid_sampler_2d grid_sampler_3d pad constant_pad_nd reflection_pad1d
reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d cat concat stack split
split_with_sizes chunk tensor_split unbind select slice narrow index index_select gather expand expand_as repeat
repeat_interleave tile roll flip permute transpose t movedim swapaxes view reshape _unsafe_view view_as reshape_as
flatten unflatten squeeze unsqueeze contiguous clone alias detach lift_fresh_copy to _to_copy type_as copy zeros ones
full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty arange scalar_tensor eye
dropout feature_dropout alpha_dropout feature_alpha_dropout size sym_size sym_numel numel dim Int Float ScalarImplicit
IntImplicit _assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size
"""
COMPUTES = frozenset(_COMPUTES.split())

# On sizes, in the graphs of torch.export.
_ARITHMETIC = "add sub mul floordiv truediv mod neg pow eq ne lt le gt ge and_ or_ not_ getitem"
_OF_SIZES = "max min int float not ite"
PLAIN_ARITHMETIC = frozenset(
    [f"_operator.{name}" for name in _ARITHMETIC.split()] + [f"torch.sym_{name}" for name in _OF_SIZES.split()]
)
