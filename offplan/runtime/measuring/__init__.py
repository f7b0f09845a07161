"""The cost of running a model is measured: whole plans, their alternatives, single layers."""
