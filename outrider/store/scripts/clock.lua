-- In front of every script.

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function integer(number)
  return string.format('%.0f', number)
end

