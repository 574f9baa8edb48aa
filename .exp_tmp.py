import sys, os, time, glob, resource
sys.path.insert(0,'src')
import torch, spillway
from spillway.demo import training, ways
from spillway.demo.records import *
way=sys.argv[1]; n=int(sys.argv[2])
st=Settings(way=way,device='cpu',layers=8,width=384,sequence=512,batch=16)
made=[]
orig=ways.Way.__init__
def init(self,*a):
    orig(self,*a); made.append(self)
ways.Way.__init__=init
left=[n]
def hear():
    left[0]-=1
    return Order.LAST_STEP if left[0]==0 else Order.STEP
marks=[]
stall=[]
def threads():
    out={}
    for f in glob.glob('/proc/self/task/*/stat'):
        s=open(f).read(); name=s[s.index('(')+1:s.rindex(')')]; r=s[s.rindex(')')+2:].split()
        out[f.split('/')[4]]=(name,int(r[11])/100,int(r[12])/100)
    return out
def say(m):
    if isinstance(m,Started): marks.append(threads()); marks.append(resource.getrusage(resource.RUSAGE_SELF))
    if isinstance(m,Step) and way=='offload': stall.append(round(made[-1]._offload.stats().stall_seconds,2))
    if isinstance(m,Outcome):
        t=threads(); b=marks[0]
        r=resource.getrusage(resource.RUSAGE_SELF)
        print(way,os.environ.get('TAG',''),'step %.2f'%m.step_seconds,[round(x,2) for x in m.all_step_seconds],'peak %d'%((m.peak_bytes-m.baseline_bytes)>>20),'stall',stall,'cpu/step user %.2f sys %.2f'%((r.ru_utime-marks[1].ru_utime)/n,(r.ru_stime-marks[1].ru_stime)/n))
        print('   ',[(v[0],tid==str(os.getpid()),round((v[1]-b.get(tid,(0,0,0))[1])/n,2),round((v[2]-b.get(tid,(0,0,0))[2])/n,2)) for tid,v in sorted(t.items()) if v[1]+v[2]-sum(b.get(tid,(0,0,0))[1:])>0.3],flush=True)
training.train(st,say,hear)
