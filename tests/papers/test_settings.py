"""What every cell of every table and figure runs, written by hand from the papers and from what code they released."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from isofed import spec
from isofed.config import Settings, read_words, settings
from isofed.data.augment import parse as parse_augment
from isofed.data.partition import parse as parse_partition
from isofed.data.sources import source
from isofed.papers import presets
from isofed.papers.plan import HOW, RECORD, Job
from isofed.papers.presets import Cell, Preset
from isofed.papers.published import PAPERS

# How to read the tables. A cell is set by what is said of "*", of its data set, of each term of its setting, of its
# method and of "last", in this order; "name@x@y" is said only where x and y hold (a variant, a preset, a data set, a
# term). Later words win. What is no setting, such as ``beta``, is put in where it stands in braces.
TERMS = {
    **{"alpha": "partition=dirichlet:X,balance=true,min=10,numpy_seed={numpy_seed}", "M": "partition=pathological:X"},
    **{"rho": "participation=X", "E": "local_epochs=X", "R": "rounds=X", "C": "clients=X", "clients": "clients=X"},
    **{"IID": "partition=iid", "homog": "partition=iid", "domain": "partition=domain"},
    **{"MobileNetV2": "model=mobilenetv2", "VGG13": "model=vgg13", "SENet": "model=senet18"},
    **{"ResNet18": "model=resnet18", "ResNet20": "model=resnet20", "ResNet32": "model=resnet32"},
    **{"ConvNet-7": "model=convnet7"},
}  # of all papers; X is what stands behind the "="
COMMON = (
    "clients=10 participation=1 weighting=samples local_epochs=10 lr_schedule=constant momentum=0.9 nesterov=false "
    "persistent_momentum=false clip=none last_batch=keep norm=own validation=0 keep_clients=none numpy_seed=none "
)
CROP = "crop:4,pad=zero+flip"
DOMAINS = "partition=domain clients=4"
FEATURES = "size=96,split=feduv,split_seed=0"
FFC = "+ffc:normalise=true,ridge=1e-6"
MOON = "moon:mu=1,temperature=0.5,head=auto,hidden=none"

FEDUV = {
    "*": f"{COMMON} batch_size=128 last_batch=drop lr=0.01 lr_schedule=cosine weight_decay=1e-5 augment={CROP} "
    "form=code detach=false c=none reset=false diagonal=false refit=",
    "*@split": "numpy_seed=42",
    "*@paper": "lr_schedule=constant last_batch=keep form=paper",
    "*@reset": "reset=true",
    "*@diagonal": "diagonal=true",
    "*@figure4": "keep_clients=last",
    "CIFAR-100": "data=cifar100:labels=fine,norm=own model=feduv-resnet18 rounds=60",
    "STL-10": "data=stl10 model=feduv-cnn rounds=100",
    "PACS": f"data=pacs:{FEATURES} model=feduv-cnn rounds=60 {DOMAINS}",
    "HAM10000": f"data=ham10000:{FEATURES} model=feduv-resnet18 rounds=60 {DOMAINS}",
    "CIFAR-100@paper": "model=feduv-resnet18-plain",
    "HAM10000@paper": "model=feduv-resnet18-plain",
    "IID@split": "partition=dirichlet:inf,numpy_seed=42",
    "TinyImageNet": "data=tiny-imagenet:size=64 model=feduv-resnet50 rounds=40",
    "Office-Home": f"data=office-home:{FEATURES} model=feduv-resnet50 rounds=40 {DOMAINS}",
    "Office-Home@table2": "rounds=60",
    "FedAvg": "method=fedavg{refit}",
    "FedAvg@ffc": f"refit={FFC} after=FedAvg",
    "FedProx": "method=fedprox:mu=0.01",
    "MOON": f"method={MOON}",
    "Freeze": "method=freeze:reset={reset}",
    "FedUV": "method=feduv:mu=0.5,lam=none,form={form},detach={detach},hinge=linear,c={c}{refit}",
    "FedUV@ffc": f"refit={FFC} after=FedUV",
    "FedUV@detached": "detach=true",
    "Only L_U@detached": "detach=true",
    "Only L_U@softened@CIFAR-100": "detach=true",
    "Only L_V@softened@CIFAR-100": "c=0.0101",
    "FedUV@softened@CIFAR-100": "detach=true c=0.0101",
    "Only L_U": "method=feduv:mu=0.5,lam=0,form={form},detach={detach},hinge=linear,c=none",
    "Only L_V": "method=feduv:mu=0,lam=none,form=code,detach=false,hinge=linear,c={c}",
    "UniVarFL": "method=univarfl:mu=0.5,lam=none,eps=0.01,diagonal={diagonal},hinge=linear",
    "last@table5": "rounds=5",
}

BASES = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox:mu=0.001",
    "FedNova": "fednova:effective=response",
    "FedOpt": "fedadam:lr=0.1,beta1=0.9,beta2=0.99,tau=0.001,v0=none,bias_correction=false",
}
CCVR = "ccvr:samples=500,epochs=10,lr=0.01,momentum=0.9,batch_size=64,relu=false"
SPHERE = "spherefed:head=orthonormal,normalise=true,loss=mse,temperature=none"
REFITTED = f"{SPHERE},calibrate=ffc,ridge=1e-6"
ORACLE = "oracle_head:epochs=10,lr=0.01,momentum=0.9,batch_size=64"
SPHEREFED = {
    "*": f"{COMMON} batch_size=64 rounds=100 lr=0.1 lr_schedule=cosine weight_decay=1e-5 augment={CROP} rate=1 tukey=1",
    "*@lr3": "rate=3",
    "*@lr10": "rate=10",
    "*@tukey": "tukey=0.5",
    "CIFAR-100": "data=cifar100:labels=fine,norm=own",
    "TinyImageNet": "data=tiny-imagenet:size=64",
    "alpha unspecified": "partition=dirichlet:0.5,balance=true,min=10",
    "loss=CE": "",
    "loss=MSE": "lr=1",
    "FedOpt+SphereFed": "lr=1",
    **{name: f"method={base}" for name, base in BASES.items()},
    **{f"{name}+CCVR": f"method={base}+{CCVR},tukey={{tukey}} after={name}" for name, base in BASES.items()},
    **{f"{name}+BABU": f"method={base}+freeze:reset=false" for name, base in BASES.items()},
    **{f"{name}+SphereFed+FFC": f"method={base}+{REFITTED} lr={{rate}}" for name, base in BASES.items()},
    "SphereFed": f"method={REFITTED} lr={{rate}}",
    "CCVR@table1": f"method={CCVR},tukey={{tukey}} after=FedAvg",
    "FedAvg@loss=MSE": "method=spherefed:head=trained,normalise=false,loss=mse,calibrate=none",
    "+Fix(R)@loss=CE": "method=freeze:reset=false",
    "+Fix(R)@loss=MSE": "method=spherefed:head=random,normalise=false,loss=mse,calibrate=none",
    "+Fix(OU)@loss=CE": "method=spherefed:head=orthonormal,normalise=false,loss=ce,temperature=none,calibrate=none",
    "+Fix(OU)@loss=MSE": "method=spherefed:head=orthonormal,normalise=false,loss=mse,calibrate=none",
    "+Norm@loss=CE": "method=spherefed:head=trained,normalise=true,loss=ce,temperature=none,calibrate=none",
    "+Norm@loss=MSE": "method=spherefed:head=trained,normalise=true,loss=mse,calibrate=none",
    "+Fix(OU)+Norm@loss=CE": "method=spherefed:head=orthonormal,normalise=true,loss=ce,temperature=none,calibrate=none",
    "+Fix(OU)+Norm@loss=MSE": f"method={REFITTED}",
    "without calibration": f"method={BASES['FedOpt']}+{SPHERE},calibrate=none",
    "FFC": f"method={BASES['FedOpt']}+{REFITTED} after=without calibration",
    "CCVR@table4": f"method={BASES['FedOpt']}+{SPHERE},calibrate=none+{CCVR},tukey={{tukey}} after=without calibration",
    "sanity check (pooled real features)": f"method={BASES['FedOpt']}+{SPHERE},calibrate=none+{ORACLE} "
    "after=without calibration",
    "*@figure3": "keep_clients=last",
    "Central": "method=central rounds=12 keep_clients=none",  # of ten epochs each
}

DECORR = "feddecorr:beta={beta},form={form}"
ALEXNET = "model=alexnet-bn partition=domain weighting=uniform rounds=300 local_epochs=1 augment=flip+rotation:30"
FEDDECORR = {
    "*": f"{COMMON} batch_size=64 rounds=100 lr=0.01 weight_decay=1e-5 model=mobilenetv2 beta=0.1 form=code "
    "prox=fedprox:mu=0.001 heavy=0.5 temperature=0.5 first=none head=head=auto,hidden=640 policy=feddecorr",
    "*@split": "numpy_seed=0",
    "*@paper": "form=paper",
    "*@released": "prox=fedavg temperature=1 first=random",
    "CIFAR10": f"data=cifar10:norm=feddecorr augment={CROP}",
    "CIFAR10@released": "heavy=0.9",
    "CIFAR100": "data=cifar100:labels=fine,norm=feddecorr weight_decay=1e-4 beta=0.05 "
    f"augment={CROP}+autoaugment:form={{policy}}",
    "CIFAR100@paper": "beta=0.1",
    "TinyImageNet": "data=tiny-imagenet:size=64 weight_decay=1e-4 rounds=50 augment=autoaugment:form={policy} "
    "head=head=none",
    "Office-Caltech10": f"data=office-caltech10:size=256,split=fedbn {ALEXNET} clients=4 head=head=auto,hidden=none",
    "DomainNet": f"data=domainnet:size=256,split=fedbn {ALEXNET} clients=6 head=head=auto,hidden=none",
    "clients=50": "participation=0.2 rounds=100",
    "clients=100": "participation=0.2 rounds=100",
    "FedAvg": "method=fedavg",
    "FedAvg+FedDecorr": f"method={DECORR}",
    "FedProx": "method={prox}",
    "FedProx+FedDecorr": f"method={{prox}}+{DECORR}",
    "FedAvgM": "method=fedavgm:momentum={heavy},damped=true,lr=1",
    "FedAvgM+FedDecorr": f"method=fedavgm:momentum={{heavy}},damped=true,lr=1+{DECORR}",
    "MOON": "method=moon:mu=1,temperature={temperature},first={first},{head}",
    "MOON+FedDecorr": f"method=moon:mu=1,temperature={{temperature}},first={{first}},{{head}}+{DECORR}",
    "FedNova": "method=fednova:effective=response",
    "Scaffold": "method=scaffold:option=2,lr=1",
    "FedBN": "method=fedbn",
    "FedBN+FedDecorr": f"method=fedbn+{DECORR}",
    "FedDecorr": "method=feddecorr:beta=0.1,form={form}",
    "DeCov": "method=decov:weight=0.001",
    "Structured-DeCov": "method=structured_decov:weight=0.001,group=8",
    "beta=0": "method=fedavg",
    **{f"beta={beta}": f"method=feddecorr:beta={beta},form=code" for beta in (0.01, 0.05, 0.1, 0.2, 0.5)},
    "last@table6": "rounds=5",
}

FEDALIGN = {
    "*": f"{COMMON} clients=16 local_epochs=20 batch_size=64 last_batch=drop rounds=25 lr=0.01 nesterov=true "
    f"persistent_momentum=true weight_decay=1e-4 augment={CROP} rescale=true limit=10 schedule=code "
    "input=cut widths=lowest quirks=frozen=eval,first=none",
    "*@split": "numpy_seed=1",
    "*@paper": "nesterov=false persistent_momentum=false last_batch=keep rescale=false limit=none schedule=paper "
    "input=whole widths=drawn",
    "*@released": "quirks=frozen=train,first=initial",
    "*@table1": "keep_clients=last",
    "*@table7": "partition=dirichlet:0.5,balance=true,min=10,numpy_seed={numpy_seed}",
    "homog@split": "partition=dirichlet:inf,numpy_seed=1",
    "CIFAR-100": "data=cifar100:labels=fine,norm=own model=resnet56",
    "CIFAR-10": "data=cifar10:norm=own model=resnet56",
    "ImageNet-200": "data=imagenet-200:size=224 model=resnet18-imagenet "
    "augment=resized_crop:scale=0.08+jitter:amount=0.4+flip",
    "C=64x0.25": "clients=64 participation=0.25",
    "C=32x0.125": "clients=32 participation=0.125",
    "FedAvg": "method=fedavg",
    "FedProx": "method=fedprox:mu=0.0001",
    "MOON": f"method={MOON},{{quirks}}",
    "Mixup": "method=mixup:gamma=0.1",
    "StochDepth": "method=stochdepth:keep=0.9,schedule={schedule}",
    "GradAug": "method=gradaug:n=2,lower=0.8,mu=1.75,sizes=auto,multiple=8,widths={widths}",
    **{
        f"GradAug(n={n})": f"method=gradaug:n={n},lower=0.8,mu={mu},sizes=auto,multiple=8,widths={{widths}}"
        for n, mu in ((1, 2), (2, 1.75), (3, 1.5), (4, 1.25))
    },
    "FedAlign": "method=fedalign:mu=0.45,width=0.25,rescale={rescale},clip={limit},iterations=10,input={input}",
}

SAID = {"feduv": FEDUV, "univarfl": FEDUV, "spherefed": SPHEREFED, "feddecorr": FEDDECORR, "fedalign": FEDALIGN}
VARIANTS = {
    "feduv": "split paper detached softened reset ffc",
    "univarfl": "split paper reset ffc diagonal",
    "spherefed": "tukey lr3 lr10",
    "feddecorr": "split paper released",
    "fedalign": "split paper released",
}
# Three seeds elsewhere.
ONCE = {
    "feduv": "table5 figure4",
    "spherefed": "table1 table2 table3 table4 figure2 figure3 figure4 figure5",
    "feddecorr": "table6 figure1 figure2 figure3 figure4 figure5 figure6 figure7 figure9",
    "fedalign": "table1",
}

FIVE = "FedAvg, FedUV, FedProx, MOON, Freeze"
APART = "FedAvg, Freeze, Only L_U, Only L_V, FedUV"
VARIED = "FedAvg, UniVarFL, FedProx, MOON, Freeze"
BOTH = "FedAvg, FedAvg+FedDecorr"
EIGHT = f"{BOTH}, FedProx, FedProx+FedDecorr, FedAvgM, FedAvgM+FedDecorr, MOON, MOON+FedDecorr"
TEN = f"{EIGHT}, FedNova, Scaffold"
BETAS = "beta=0, beta=0.01, beta=0.05, beta=0.1, beta=0.2, beta=0.5"
SIX = "FedAvg, GradAug, FedProx, MOON, Mixup, StochDepth"
COSTED = "FedAvg, FedAlign, GradAug(n=2), FedProx, MOON, Mixup, StochDepth"
PAIRS = {"MobileNetV2": "FedAvg", "ResNet18": "FedProx", "VGG13": "FedNova", "SENet": "FedOpt"}.items()
FOUR = "{0}, {0}+CCVR, {0}+SphereFed+FFC, {0}+BABU"
PARTS = "FedAvg, +Fix(R), +Fix(OU), +Norm, +Fix(OU)+Norm"
CALIBRATED = "without calibration, FFC, CCVR, sanity check (pooled real features)"
SPLITS = "alpha=0.5, alpha=0.1, IID"
# Presets, data sets, settings and methods; what stands on both sides of a ";" is joined by one, each with each.
ROWS: dict[str, Sequence[tuple[str, str, str, str]]] = {
    "feduv": [
        ("table1", "CIFAR-100, STL-10, TinyImageNet", "alpha=0.01, alpha=1.0", FIVE),
        ("table1, table5", "PACS, HAM10000, Office-Home", "domain", FIVE),
        ("table2", "STL-10", "alpha=0.01; rho=0.1, rho=0.5, rho=1.0", FIVE),
        ("table2", "Office-Home", "rho=0.25, rho=0.5, rho=1.0", FIVE),
        ("table3", "STL-10", "alpha=0.01; E=10, E=20, E=40", FIVE),
        ("table3", "Office-Home", "E=10, E=20, E=40", FIVE),
        ("table4", "CIFAR-100, STL-10, TinyImageNet", "alpha=0.01", APART),
        ("table4", "PACS, HAM10000, Office-Home", "domain", APART),
        ("table5", "CIFAR-100, STL-10, TinyImageNet", "alpha=0.01", FIVE),
        ("figure1", "CIFAR-100", "IID, alpha=0.01", "FedAvg, FedUV, Freeze"),
        ("figure3", "STL-10", "alpha=0.01", FIVE),
        ("figure3", "PACS", "domain", FIVE),
        ("figure4", "STL-10", "alpha=0.01", "FedAvg, FedUV"),
    ],
    "univarfl": [
        ("table1", "CIFAR-100, STL-10", "alpha=0.01, alpha=1.0", VARIED),
        ("table1", "PACS, HAM10000", "domain", VARIED),
        ("table2", "STL-10", "alpha=0.01; rho=0.1, rho=0.5, rho=1.0", VARIED),
    ],
    "spherefed": [
        ("table1", "CIFAR-100", "MobileNetV2; alpha=0.5", "FedAvg, CCVR, SphereFed"),
        *(("table2", "CIFAR-100", f"{network}; {SPLITS}", FOUR.format(base)) for network, base in PAIRS),
        *(("table2", "TinyImageNet", f"{network}; alpha unspecified", FOUR.format(base)) for network, base in PAIRS),
        ("table3", "CIFAR-100", "MobileNetV2; alpha=0.5; loss=CE, loss=MSE", PARTS),
        ("table4", "CIFAR-100", "SENet; FedOpt+SphereFed; alpha=0.1, IID", CALIBRATED),
        ("figure2", "CIFAR-100", f"ResNet18; {SPLITS}; R=50", "FedAvg"),
        ("figure3", "CIFAR-100", "MobileNetV2; alpha=0.1", "FedAvg, FedAvg+SphereFed+FFC"),
        ("figure3", "CIFAR-100", "MobileNetV2; IID", "Central"),
        ("figure4", "CIFAR-100", "MobileNetV2; alpha=0.5, alpha=0.1", "FedAvg, FedAvg+SphereFed+FFC, FedAvg+BABU"),
        ("figure5", "CIFAR-100", "ConvNet-7; alpha=0.5", "FedAvg, FedAvg+SphereFed+FFC, FedAvg+BABU"),
    ],
    "feddecorr": [
        ("table1", "CIFAR10, CIFAR100, TinyImageNet", "alpha=0.05, alpha=0.1, alpha=0.5, alpha=inf", TEN),
        ("table2", "CIFAR10", "M=3, M=4, M=5", TEN),
        ("table2", "CIFAR100", "M=20, M=30, M=40", TEN),
        ("table2", "TinyImageNet", "M=80, M=90, M=100", TEN),
        ("table3", "Office-Caltech10, DomainNet", "domain", f"{EIGHT}, FedBN, FedBN+FedDecorr"),
        ("table4", "CIFAR100, TinyImageNet", "alpha=0.05, alpha=0.1; clients=10, clients=20, clients=30", BOTH),
        ("table4", "CIFAR100, TinyImageNet", "alpha=0.05, alpha=0.1; clients=50, clients=100", BOTH),
        ("table5", "CIFAR100, TinyImageNet", "alpha=0.05, alpha=0.1; E=1, E=5, E=10, E=20", BOTH),
        ("table6", "CIFAR10, CIFAR100, TinyImageNet", "alpha=0.5", f"{BOTH}, FedProx, MOON"),
        ("table7", "TinyImageNet", "alpha=0.05, alpha=0.1, alpha=0.5", "FedAvg, FedDecorr, DeCov, Structured-DeCov"),
        ("table8", "CIFAR10", "alpha=0.05, alpha=0.1; MobileNetV2, ResNet18, ResNet32", BOTH),
        ("figure1", "CIFAR10", "ResNet20; alpha=inf", "FedAvg"),
        ("figure1", "CIFAR10", "ResNet20; alpha=0.05", BOTH),
        ("figure2, figure3", "CIFAR100", "alpha=0.01, alpha=0.05, alpha=0.25, alpha=inf", "FedAvg"),
        ("figure4", "CIFAR100", "alpha=0.01, alpha=0.05", BOTH),
        ("figure5", "CIFAR100", "alpha=0.01, alpha=0.05, alpha=0.25, alpha=inf", BOTH),
        ("figure6", "CIFAR100", "alpha=0.05", "FedAvg, FedProx, FedAvgM, MOON"),
        ("figure7", "CIFAR100", "alpha=0.05", "FedAvg+FedDecorr, FedProx+FedDecorr, FedAvgM+FedDecorr, MOON+FedDecorr"),
        ("figure8", "CIFAR10, CIFAR100, TinyImageNet", "alpha=0.05, alpha=0.1", f"{BOTH}, MOON, MOON+FedDecorr"),
        ("figure9", "CIFAR100, TinyImageNet", "alpha=0.05, alpha=0.1", BETAS),
    ],
    "fedalign": [
        ("table1", "CIFAR-100", "alpha=0.5; C=16; E=20; R=25", f"{SIX}, FedAlign"),
        ("table2", "CIFAR-100", "alpha=0.1, alpha=0.5, alpha=2.5, homog", SIX),
        ("table3", "CIFAR-100", "alpha=0.5; E=10, E=20, E=30", SIX),
        ("table4", "CIFAR-100", "alpha=0.5; C=16, C=32, C=64, C=64x0.25", SIX),
        ("table4", "CIFAR-100", "alpha=0.5; C=64x0.25; R=100", SIX),
        ("table5", "CIFAR-100", "alpha=0.5; C=16; E=20", f"{COSTED}, GradAug(n=1), GradAug(n=3), GradAug(n=4)"),
        ("table5", "CIFAR-100", "alpha=0.5; C=16; E=20; R=3", f"{COSTED}, GradAug(n=1), GradAug(n=3), GradAug(n=4)"),
        ("table6", "CIFAR-100", "alpha=0.1, alpha=2.5, homog", "FedAlign"),
        ("table6", "CIFAR-100", "alpha=0.5; E=10, E=30, C=32, C=64, C=64x0.25", "FedAlign"),
        ("table6", "CIFAR-100", "alpha=0.5; C=64x0.25; R=100", "FedAlign"),
        ("table7", "CIFAR-10, ImageNet-200", "C=16", f"{COSTED}, GradAug(n=1)"),
        ("table7", "CIFAR-10", "C=64x0.25; R=100", f"{COSTED}, GradAug(n=1)"),
        ("table7", "ImageNet-200", "C=32x0.125; R=50", f"{COSTED}, GradAug(n=1)"),
        ("figure1", "CIFAR-100", "alpha=0.5; C=16; E=20", COSTED),
    ],
}

Place = tuple[str, str, str, str]  # preset, data set, setting, method


@cache
def known(paper: str) -> list[Preset]:
    return [presets.load(paper, name) for name in presets.names(paper)]


def places(paper: str) -> list[Place]:
    """The place of every cell, by the rows."""
    found: list[Place] = []
    for names, datasets, terms, methods in ROWS[paper]:
        joined = [";".join(some) for some in itertools.product(*(part.split(", ") for part in terms.split("; ")))]
        found += itertools.product(names.split(", "), datasets.split(", "), joined, methods.split(", "))
    return found


@cache
def said(paper: str, name: str) -> list[tuple[list[str], dict[str, str]]]:
    """What is said of a name, each with where it is said."""
    kind, _, value = name.partition("=")
    lines = [([name], TERMS[kind].replace("X", value))] if kind in TERMS else []
    lines += [(key.split("@"), words) for key, words in SAID[paper].items() if key.partition("@")[0] == name]
    assert lines or name == "last", f"nothing is said of {name} in {paper}"
    words = [(where, re.split(r" +(?=\w+=)", text.strip())) for (_, *where), text in lines]
    return [(where, dict(word.split("=", 1) for word in some if word)) for where, some in words]


def wanted(paper: str, place: Place, variant: str) -> dict[str, str]:
    """What the tables above say of a cell, in words."""
    preset, dataset, setting, method = place
    terms = setting.split(";")
    here, values = {variant, preset, dataset, *terms}, dict[str, str]()
    for where, words in (line for name in ("*", dataset, *terms, method, "last") for line in said(paper, name)):
        values |= words if here.issuperset(where) else {}
    values = {key: word.format_map(values) for key, word in values.items()}
    return {key: word for key, word in values.items() if key in Settings.model_fields or key == "after"}


def meaning(s: Settings) -> dict[str, Any]:
    """What settings are, however they are written and whether or not defaults are spelled out."""
    values = s.model_dump(exclude={*HOW, *RECORD, "root", "seed", "method"} - {"keep_clients"})
    data = spec.parse_one(s.data, "data set")
    values["data"] = spec.make(source(data.name), data, "data set")
    values["partition"], values["augment"] = parse_partition(s.partition), parse_augment(s.augment)
    parts = [str(part) for part in spec.parse(s.method.to_yaml(), "method")]
    values["method"] = "+".join(part for part in parts if part != "fedavg")  # which adds nothing to others
    return values


MEANT: dict[str, dict[str, Any]] = {}  # by what it is of: many cells are the same run


def wrong(cell: Cell, words: dict[str, str]) -> list[str]:
    after, found, asked = words.pop("after", None), repr(sorted(cell.values.items())), repr(sorted(words.items()))
    if found not in MEANT:
        MEANT[found] = meaning(Job(cell, 0).settings)
    if asked not in MEANT:
        MEANT[asked] = meaning(settings(read_words(f"{key}={word}" for key, word in words.items())))
    one, other = MEANT[found] | {"after": cell.after}, MEANT[asked] | {"after": after}
    return [f"{cell.preset} {cell}: {key}={one[key]}, not {other[key]}" for key in other if one[key] != other[key]]


def cells_of(paper: str, variant: str) -> dict[Place, Cell]:
    """All cells as they are in a variant, also those that it leaves as they were."""
    some = [cell for preset in known(paper) for cell in (*preset.cells, *preset.variants.get(variant, ()))]
    return {(cell.preset, cell.dataset, cell.setting, cell.method): cell for cell in some}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_cell_has_its_row_and_every_row_its_cells(paper: str) -> None:
    assert len(places(paper)) == len(set(places(paper))) == sum(len(preset.cells) for preset in known(paper))
    assert set(places(paper)) == set(cells_of(paper, "default"))


@pytest.mark.parametrize("paper", PAPERS)
def test_variants_and_seeds_are_those_of_the_paper(paper: str) -> None:
    once = ONCE.get(paper, "").split()
    assert {variant for preset in known(paper) for variant in preset.variants} == set(VARIANTS[paper].split())
    assert {p.name: p.seeds for p in known(paper)} == {p.name: 1 if p.name in once else 3 for p in known(paper)}


EVERY = [(paper, variant) for paper in PAPERS for variant in ("default", *VARIANTS[paper].split())]


@pytest.mark.parametrize(("paper", "variant"), EVERY, ids=lambda text: text)
def test_every_cell_runs_what_the_tables_say(paper: str, variant: str) -> None:
    cells = cells_of(paper, variant)
    differ = [line for place in places(paper) for line in wrong(cells[place], wanted(paper, place, variant))]
    assert not differ, "\n".join([f"{len(differ)} settings differ:", *differ[:40]])
