"""Each policy's steady state: control variables and a scenario in, Estimate and a typical period's Timeline out."""
