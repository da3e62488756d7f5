"""The slot protocol: a region's layout, the frames around it, and the kernels that fold it.

Shared by the two ends, the aggregator service and the Agent library (ARCHITECTURE.md, The slot
protocol).
"""
