"""The vLLM on which SamuLLM and SeaLLM are built: synchronous versions, without compared measurements.

Its constants are those fitted to TensorRT-LLM's published throughputs, with a vLLM server's time per iteration.
"""

from xcore.specs.engine_spec import EngineSpec

VLLM_OF_2024 = EngineSpec("vllm-2024", wait_s=23e-6, clock=0.88, iteration_s=1.03e-3, sequence_s=0.5e-6)
