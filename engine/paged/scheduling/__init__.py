"""Which tokens the next step computes, and which rows run or wait. No file here sees a tensor."""
