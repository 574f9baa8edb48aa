import sys, time, os, hashlib, statistics, contextlib, json, resource
sys.path.insert(0,'src')
import importlib.util
import torch
spec=importlib.util.spec_from_file_location('m','src/spillway/demo/model.py'); m=importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
way,L,W,S,B,steps=sys.argv[1],*map(int,sys.argv[2:7])
def st(k):
    for l in open('/proc/self/status'):
        if l.startswith(k): return int(l.split()[1])/1024
def mk(L,W,S):
    torch.manual_seed(0)
    return m.GPT(layers=L,width=W,heads=W//64,sequence=S)
data=torch.frombuffer(bytearray(b''.join(open('/usr/lib/python3.12/'+f,'rb').read() for f in ('argparse.py','typing.py','inspect.py','subprocess.py'))),dtype=torch.uint8) if os.path.exists('/usr/lib/python3.12/argparse.py') else torch.randint(0,256,(200000,),dtype=torch.uint8)
g=torch.Generator().manual_seed(0)
def batch(B,S):
    i=torch.randint(0,len(data)-S-1,(B,1),generator=g)+torch.arange(S+1)
    t=data[i].long(); return t[:,:-1],t[:,1:]
def step(mod,opt,x,y):
    opt.zero_grad()
    if way=='offload':
        import spillway
        with spillway.offload(): loss=mod(x,y)
    elif way=='saveoncpu':
        with torch.autograd.graph.save_on_cpu(): loss=mod(x,y)
    else: loss=mod(x,y)
    loss.backward(); opt.step(); return loss.item()
if os.environ.get('WARM'):
    w=mk(2,64,64); o=torch.optim.AdamW(w.parameters()); step(w,o,*batch(2,64)); del w,o
mod=mk(L,W,S); mod.checkpoint_blocks=way=='checkpoint'
opt=torch.optim.AdamW(mod.parameters(),lr=float(os.environ.get('LR','1e-3')),betas=(0.9,0.95))
x=batch(B,S)
base=st('VmRSS'); 
open('/proc/self/clear_refs','w').write('5')
ts=[];ls=[]
for i in range(steps):
    x=batch(B,S)
    t=time.perf_counter(); ls.append(step(mod,opt,*x)); ts.append(time.perf_counter()-t)
    if os.environ.get('V'): print(i,round(ts[-1],2),ls[-1],int(st('VmRSS')-base),int(st('VmHWM')-base),flush=True)
r=resource.getrusage(resource.RUSAGE_SELF)
print(way,L,W,S,B,'params %.1fM'%(sum(p.numel() for p in mod.parameters())/1e6),'step med %.2f min %.2f max %.2f'%(statistics.median(ts[1:]),min(ts[1:]),max(ts[1:])),'first %.2f'%ts[0],'base %d peak+ %d end+ %d'%(base,st('VmHWM')-base,st('VmRSS')-base),'RssFile %d'%st('RssFile'),'minflt %d'%r.ru_minflt,'sys %.1f user %.1f'%(r.ru_stime,r.ru_utime),'loss %.3f'%ls[-1],flush=True)
