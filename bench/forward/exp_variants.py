import os, sys, time, types, json
import torch
from bench.common import native, timing, results
from bench.forward import measure as forward
# usage: variants.py CELLS PATTERNS idle variants...   variant = name:ENV=VAL,ENV=VAL (drop: no env)
def main():
    cells=[c.split(',') for c in sys.argv[1].split()]
    patterns=sys.argv[2].split(','); idle=float(sys.argv[3]); variants=sys.argv[4:]
    bench=forward.Bench(types.SimpleNamespace(library=[],idle=idle,peers=['cudnn'],only=[],seconds=1e9))
    timing.warm_up(3.0)
    rows=[]
    for n,d,mask in cells:
        cell=forward.Cell(int(n),int(d),mask=mask)
        graphs,_=bench.graph_peers(cell,['cudnn'])
        for p in patterns:
            for v in variants:
                name,_,env=v.partition(':')
                sets=dict(e.split('=') for e in env.split(',') if e)
                for k in list(os.environ):
                    if k.startswith('REST_'): os.unsetenv(k); del os.environ[k]
                os.environ.update(sets)
                rest='drop' if name=='drop' else 'mean'
                opt={'pattern':forward.PATTERNS[p],'causal':cell.causal,'rest':rest}
                try: graphs[p,name]=timing.Graphed([native.prepare(*qkv,**opt)[0] for qkv in cell.sets])
                except RuntimeError as e: print('skip',p,name,str(e)[:80])
        t=bench.time_in_turn(graphs,cell.flop)
        c=t['cudnn']['burst']['median_us']
        for p in patterns:
            dr=t[p,'drop']['burst']['median_us']
            print(f"{p} {n:>5} {d:>3} {mask[:4]} cudnn {c:7.1f} drop {dr:7.1f} | "+' '.join(f"{k[1]} {x['burst']['median_us']:.1f} ({dr/x['burst']['median_us']:.3f})" for k,x in t.items() if k!='cudnn' and k[0]==p and k[1]!='drop'),flush=True)
            rows.append({'n':n,'d':d,'mask':mask,'p':p,'cudnn':c,**{k[1]:x['burst'] for k,x in t.items() if k!='cudnn' and k[0]==p}})
        if os.environ.get('OUT'): json.dump(rows,open(os.environ['OUT']+'/variants.json','w'))
        del graphs,cell; torch.cuda.empty_cache()
main()
