"""The papers whose equations stand in fastweight.py and caches.py, and a file for each of the five that are
re-implemented: schlag.py, kasai.py, mao.py, oren.py, zhang.py. beyond.py has suites of our own.

rules     Katharopoulos 2020 (arXiv:2006.16236), Peng 2021 RFA (2103.02143), Schlag 2021 (2102.11174), Mao
          2022 (2210.04243), Sun 2023 RetNet (2307.08621), Yang 2023 GLA (2312.06635), Dao 2024 Mamba-2
          (2405.21060), Yang 2024 DeltaNet (2406.06484), gated DeltaNet (2412.06464), Kimi 2025 KDA
          (2510.26692), Hatamizadeh 2026 gated DeltaNet-2 (2605.22791)
maps      Choromanski 2021 FAVOR+ (2009.14794), Kasai 2021 T2R (2103.13076), Qin 2022 cosFormer (2202.08791),
          Zhang 2024 Hedgehog (2402.04347), Arora 2024 Based (2402.18668)
caches    Oren 2024 TOVA (2401.06104), Zhang 2023 H2O (2306.14048), Xiao 2023 StreamingLLM (2309.17453)
"""
