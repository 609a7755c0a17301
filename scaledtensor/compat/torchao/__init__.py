"""The names of torchao's FP8 training (0.18, and earlier versions that had delayed and static
scaling), for programs written to it.

    from scaledtensor.compat.torchao.float8 import Float8LinearConfig, convert_to_float8_training

The training programs of its README run after a change of the import. This package has the names
that configure and convert a model, from `torchao.float8` and its modules `config`, `float8_linear`,
`float8_linear_utils` and `fsdp_utils`. It has no `Float8TrainingTensor` and no functions that make
one: the tensors are `scaledtensor.ScaledTensor`. The config becomes a recipe of this library.
`scale_model` applies the recipe to the linear layers that the filter accepts: to the weight, which
products cast, and to the bias, which is added outside of the products.

The intended differences:

==============================  ===============================  ===================================
name                            published                        here
==============================  ===============================  ===================================
between the layers              plain tensors                    ScaledTensors in the dtype of the
                                                                 weight, on which norms, activations
                                                                 and losses run by their rules;
                                                                 `scaledtensor.drop` ends that
linear layers                   replaced by new modules          the modules stay, with their hooks:
                                                                 their class becomes `Float8Linear`,
                                                                 their parameters ScaledTensors; a
                                                                 subclass of `nn.Linear` keeps its
                                                                 class
state dicts                     plain weights                    ScaledTensors, exact and with their
                                                                 recipe; `unscale_model` makes the
                                                                 weights plain again
without FP8 units               `emulate=True`, or an error      emulated, on a CPU too
products of cast operands       in the dtype of the input        float32 sums, rounded to bfloat16
delayed scaling                 removed; earlier, values that    supported; values that grow are
                                grew saturated                   scaled by their own amax
`use_fast_accum`                for each product                 the same; but if an operand has one
                                                                 scale and is cast once, both or
                                                                 none of the backward products use
                                                                 it
DELAYED with another type       supported earlier                only with tensorwise DYNAMIC, and
                                                                 for both products of an operand
static scales                   any number                       powers of two
float8 all-gather               if it is enabled                 if `fully_shard` shards a weight
                                                                 with one scale that is not from a
                                                                 history; the option has no effect
a root linear layer             refused if it has children       converted, with its children
FNUZ formats                    chosen on an MI300               chosen by `target_dtype`
wrong arguments                 AssertionError                   `RecipeError`, `UnsupportedError`,
                                                                 `ModelError`
==============================  ===============================  ===================================
"""

from scaledtensor.compat.torchao import float8

__all__ = ["float8"]
