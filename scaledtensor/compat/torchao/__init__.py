"""The FP8 training of torchao (0.18, and the earlier versions that had delayed and static scaling),
for programs that were written to it.

    from scaledtensor.compat.torchao.float8 import Float8LinearConfig, convert_to_float8_training

A change of the import is all that the training programs of its README need. Here are the names that
configure and convert a model, of `torchao.float8` and of its modules `config`, `float8_linear`,
`float8_linear_utils` and `fsdp_utils`. `Float8TrainingTensor` and the functions that make one are
not here: the tensors are `scaledtensor.ScaledTensor`. The config becomes a recipe of this library,
and `scale_model` applies it to the linear layers that the filter takes: to the weight, which
products cast, and to the bias, which is added outside of them.

What differs, on purpose:

==============================  ===============================  ===================================
what                            published                        here
==============================  ===============================  ===================================
between the layers              plain tensors                    ScaledTensors in the dtype of the
                                                                 weight, on which norms, activations
                                                                 and losses run by their rules;
                                                                 `scaledtensor.drop` ends that
linear layers                   replaced by a new `Float8Linear` the modules stay, with their hooks:
                                                                 their class becomes `Float8Linear`,
                                                                 their parameters ScaledTensors; one
                                                                 of a class of its own stays of it
state dicts                     plain weights                    ScaledTensors, exact and with their
                                                                 recipe; `unscale_model` is the way
                                                                 back
without FP8 units               `emulate=True`, or an error      emulated, on a CPU too
products of cast operands       of the dtype of the input        bfloat16 of float32 sums
delayed scaling                 removed; before, what grew       here; what grows is scaled by its
                                saturated                        own amax
`use_fast_accum`                for each product                 the same, but where an operand has
                                                                 one scale and is cast once: in the
                                                                 backward pass for both or neither
DELAYED with another type       taken, before                    with tensorwise DYNAMIC, for both
                                                                 products of an operand, or refused
static scales                   any number                       powers of two
float8 all-gather               where it is enabled              wherever `fully_shard` shards a
                                                                 weight with one scale that is no
                                                                 history's; the option has no effect
a root linear layer             refused where it has children    converted, with its children
FNUZ formats                    chosen on an MI300               chosen by `target_dtype`
wrong arguments                 AssertionError                   `RecipeError`, `UnsupportedError`,
                                                                 `ModelError`
==============================  ===============================  ===================================
"""

from scaledtensor.compat.torchao import float8

__all__ = ["float8"]
