// The hardware option "Own accelerator", whose value is built from the numbers below the choice of hardware.
const PREFIX = "own:";

/** The option of the own accelerator in a choice of hardware. */
const findOption = (select) => [...select.options].find((option) => option.value.startsWith(PREFIX));

/** Write the numbers as a cluster, such as "own:memory_gb=80,bf16_tflops=989". Empty fields are left out. */
export function formatCluster(pairs) {
  const filled = pairs.filter(([, text]) => text.trim() !== "");
  // A comma in a number would start the next field.
  return PREFIX + filled.map(([name, text]) => `${name}=${text.trim().replaceAll(",", " ")}`).join(",");
}

/** Read the numbers of a cluster as [name, text] pairs. */
export function parseCluster(value) {
  const parts = value.slice(PREFIX.length).split(",").filter(Boolean);
  return parts.map((part) => {
    const [name, ...text] = part.split("=");
    return [name, text.join("=")];
  });
}

/**
 * Show the numbers if the own accelerator is chosen, and keep the value of its option up to date.
 * @param {HTMLSelectElement} select
 * @param {HTMLElement} panel
 */
export function setUpOwnAccelerator(select, panel) {
  const inputs = /** @type {HTMLInputElement[]} */ ([...panel.querySelectorAll("[data-own]")]);
  const option = findOption(select);
  const show = () => {
    panel.hidden = !option.selected;
  };
  const write = () => {
    option.value = formatCluster(inputs.map((input) => [input.dataset.own, input.value]));
  };
  if (option.value === PREFIX) write();
  else fill(inputs, option.value);
  panel.addEventListener("input", () => {
    write();
    select.dispatchEvent(new Event("change"));
  });
  select.addEventListener("input", show);
  select.addEventListener("change", show);
  show();
}

/** Choose hardware by its name. The numbers of an own accelerator are filled in. */
export function chooseHardware(select, panel, value) {
  if (value.startsWith(PREFIX)) {
    findOption(select).value = value;
    fill([...panel.querySelectorAll("[data-own]")], value);
  }
  select.value = value;
  select.dispatchEvent(new Event("change"));
}

function fill(inputs, value) {
  const numbers = new Map(parseCluster(value));
  for (const input of inputs) input.value = numbers.get(input.dataset.own) ?? "";
}
