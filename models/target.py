def provenance(**facts): return facts
