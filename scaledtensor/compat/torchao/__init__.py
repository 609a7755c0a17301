"""The FP8 training of torchao (0.18, and the earlier versions that had delayed and static scaling),
for programs that were written to it.

    from scaledtensor.compat.torchao.float8 import Float8LinearConfig, convert_to_float8_training

A change of the import is all that its documented examples need. The config becomes a recipe of this
library, and `scale_model` applies it to the linear layers that the filter takes: to the weight,
which products cast, and to the bias, which is added outside of them.

What differs, on purpose:

==============================  ===============================  ===================================
what                            published                        here
==============================  ===============================  ===================================
between the layers              plain tensors                    ScaledTensors in the dtype of the
                                                                 weight, on which norms, activations
                                                                 and losses run by their rules;
                                                                 `scaledtensor.drop` ends that
linear layers                   replaced by `Float8Linear`       the modules stay, with their hooks;
                                                                 their parameters are ScaledTensors
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
DELAYED with another type       taken, before                    refused: all three operands or none
static scales                   any number                       powers of two
float8 all-gather               FSDP2                            refused: nothing is sharded here
FNUZ formats                    chosen on an MI300               chosen by `target_dtype`
wrong arguments                 AssertionError                   `RecipeError`, `UnsupportedError`,
                                                                 `ModelError`
==============================  ===============================  ===================================
"""

from scaledtensor.compat.torchao import float8

__all__ = ["float8"]
