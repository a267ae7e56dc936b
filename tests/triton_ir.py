"""What Pallas hands to Triton, checked without a GPU by Triton's own rules of its dialect."""

from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def triton_kernels(function: Any, *args: Any, **kwargs: Any) -> list[ir.Module]:
    """The Triton modules of a jitted function lowered for an H200, verified: raises MLIRError for
    one that Triton would refuse, as lowering itself does not."""
    with jax.sharding.use_abstract_mesh(H200):
        lowered = function.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    found: list[ir.Module] = []

    def visit(operation: ir.Operation) -> None:
        attributes = operation.attributes
        if "call_target_name" in attributes and "triton" in str(attributes["call_target_name"]):
            config = ir.DictAttr(attributes["mhlo.backend_config"])
            code = {entry.name: entry.attr for entry in config}["ir"]
            with ir.Context() as context:
                dialect.register_dialect(context)
                found.append(ir.Module.parse(ir.StringAttr(code).value_bytes))
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    return found
