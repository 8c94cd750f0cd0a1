import sys, torch
from bench.common import native
from bench.forward import measure as forward
for n,d,rest in ((4096,64,'drop'),(4096,64,'mean'),(4096,128,'drop'),(4096,128,'mean'),(1024,64,'mean')):
    q=[torch.randn(16384//n,2048//d,n,d,device='cuda',dtype=torch.bfloat16) for _ in range(3)]
    run,_,_=native.prepare(*q,pattern=(2,4),causal=(n==1024),rest=rest); run(); torch.cuda.synchronize()
