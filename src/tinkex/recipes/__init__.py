"""SFT, RL and DPO as short plain loops: run them with `tinkex train`, or copy and change them."""
