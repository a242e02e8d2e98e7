"""placeholder"""
def write_folder(folder, model, tokenizer, facts):
    import json
    model.save_pretrained(folder); tokenizer.save_pretrained(folder); (folder/"provenance.json").write_text(json.dumps(facts, indent=1))
