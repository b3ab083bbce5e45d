// The Planner's methods that lower memory: LoRA, quantized weights, other optimizers, and offload.

/** The inputs below `form`, each with its name in the spec. */
const inputs = (form) => [...form.querySelectorAll("[data-memory]")];
const WITH_LORA = ["lora_targets", "frozen_weights"];

/** The memory options of a spec. Options with their default are left out, and so is an empty section. */
export function readMemory(form) {
  const memory = {};
  const rank = form.querySelector('[data-memory="lora_rank"]').value.trim();
  for (const input of inputs(form)) {
    const name = input.dataset.memory;
    if (input.type === "checkbox") {
      if (input.checked) memory[name] = true;
    } else if (name === "lora_rank") {
      if (rank) memory[name] = /^\d+$/.test(rank) ? Number(rank) : rank;
    } else if (input.selectedIndex > 0 && (rank || !WITH_LORA.includes(name))) memory[name] = input.value;
  }
  return Object.keys(memory).length > 0 ? { memory } : {};
}

/** Fill in the memory options of a spec, and open the section if an option is set. */
export function putMemory(form, memory) {
  for (const input of inputs(form)) {
    const value = memory?.[input.dataset.memory];
    if (input.type === "checkbox") input.checked = value === true;
    else if (input.dataset.memory === "lora_rank") input.value = value ?? "";
    else input.value = value ?? input.options[0].value;
  }
  form.querySelector("[data-memory-options]").open = Object.keys(memory ?? {}).length > 0;
  showMemory(form);
}

/** Show the options of LoRA if a rank is entered. */
export function showMemory(form) {
  const isSet = form.querySelector('[data-memory="lora_rank"]').value.trim() !== "";
  for (const field of form.querySelectorAll("[data-with-lora]")) field.hidden = !isSet;
}
